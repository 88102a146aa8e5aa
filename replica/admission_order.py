"""Who is admitted first: the longest cached prefix, but nobody is overtaken more than so often.

Admitting first who needs least prefill shortens the mean wait, and uses a prefix before it is evicted; alone
it would let a cold prompt wait for ever. (SGLang's lpm, which has no such bound and falls back to arrival
order above 128 waiting.)
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row
from typing import Any

from replica.kv_cache.cache import Cache
from replica.sequence import Sequence

WINDOW = 64
"""Of a longer queue only the first so many are looked up; the others keep their place behind them."""


def longest_prefix_first(waiting: Row[Sequence], cache: Cache[Any], max_overtaken: int) -> list[Sequence]:
    """The first ``WINDOW`` of ``waiting`` (sorted by priority, then arrival) in order of admission.

    Within a priority: who was overtaken ``max_overtaken`` times, by arrival; then by matched blocks.

    >>> from replica.kv_cache.prefix_cache import PrefixCache
    >>> cache = PrefixCache(16, block_size=4)
    >>> first = Sequence("first", range(8), max_tokens=1)
    >>> _ = cache.adopt(first, []); first.computed_tokens = 8; cache.publish(first)
    >>> line = [Sequence(n, t, max_tokens=1) for n, t in (("cold", [9] * 6), ("warm", range(6)))]
    >>> [s.request_id for s in longest_prefix_first(line, cache, max_overtaken=3)]
    ['warm', 'cold']
    >>> line[0].overtaken = 3
    >>> [s.request_id for s in longest_prefix_first(line, cache, max_overtaken=3)]
    ['cold', 'warm']
    """
    ranked = []
    for place, sequence in enumerate(waiting[:WINDOW]):
        starved = sequence.overtaken >= max_overtaken
        matched = 0 if starved else len(cache.match(sequence))
        ranked.append((sequence.priority, not starved, -matched, place, sequence))
    ranked.sort(key=lambda entry: entry[:4])
    return [entry[4] for entry in ranked]


def count_overtaken(
    waiting: Iterable[Sequence], admitted: Sequence, stepped_aside: Row[Sequence], max_overtaken: int
) -> bool:
    """``admitted`` left the queue before those of its priority who came earlier; True: somebody is next now.

    Those who ``stepped_aside`` to wait for another's prefill were not overtaken.
    """
    enough = False
    for sequence in waiting:
        if sequence.precedence >= admitted.precedence:
            break
        if sequence.priority == admitted.priority and sequence not in stepped_aside:
            sequence.overtaken += 1
            enough = enough or sequence.overtaken >= max_overtaken
    return enough
