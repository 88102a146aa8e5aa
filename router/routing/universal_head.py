"""How much of a prompt most of the traffic begins with: a system prompt, the tools, a common document.

Every replica ends up holding it, so it is nobody's home. But one that has just joined lacks it, and as long
as a request is answered sooner where it is cached, none comes to compute it there. A policy may treat it as
held by those who have next to nothing to do (``RoutingRequest.universal_tokens``).
"""

from collections.abc import Sequence
from typing import Final

from router.routing.prompt_blocks import Prompt

MOST_OF_TRAFFIC: Final = 0.5
MOST_PAST_HEAD: Final = 1.25
"""Who holds no more than so many times what most of the traffic begins with is not warmer for it."""
COUNT_EVERY: Final = 7
"""Of so many requests one is counted; a prime, for traffic that has a rhythm."""
ENOUGH: Final = 12
"""Counted requests of a model before anything is said of it."""
FORGET_AT: Final = 256
"""Counted requests; then all counts are halved."""
FINE: Final = 16
GROWTH: Final = 1.1


def _marks(limit: int) -> list[int]:
    marks = list(range(FINE))
    while marks[-1] < limit:
        marks.append(int(marks[-1] * GROWTH) + 1)
    return marks


MARKS: Final = _marks(65_536)
"""Blocks that are counted, from 0: all at first, then every tenth part further."""


class UniversalHead:
    """Counts which blocks requests begin with. A sample, whose counts forget.

    >>> head = UniversalHead()
    >>> for user in range(200):                                    # 20 blocks in common, then 20 of one's own
    ...     keys = list(range(20)) + list(range(1_000 * user + 100, 1_000 * user + 120))
    ...     head.asked(Prompt(keys=keys, units=1_280))
    >>> head.blocks(Prompt(keys=keys, units=1_280), replicas=8)           # all 20: block 19 is counted, too
    20
    >>> head.blocks(Prompt(keys=range(500, 540), units=1_280), replicas=8)
    0
    """

    __slots__ = ("_counted", "_counts", "_requests", "_seen")

    def __init__(self) -> None:
        self._seen = self._counted = 0
        self._requests: dict[str | None, int] = {}
        """Counted requests by model."""
        self._counts: dict[int, int] = {}
        """By key of a block (the model is in it): counted requests that begin with it."""

    def asked(self, prompt: Prompt) -> None:
        """A request came."""
        self._seen += 1
        if self._seen % COUNT_EVERY or not prompt.keys:
            return
        keys, counts, requests = prompt.keys, self._counts, self._requests
        for mark in MARKS:
            if mark >= len(keys):
                break
            key = keys[mark]
            counts[key] = counts.get(key, 0) + 1
        requests[prompt.model] = requests.get(prompt.model, 0) + 1
        self._counted += 1
        if self._counted >= FORGET_AT:
            self._counted //= 2
            self._counts = {key: count // 2 for key, count in counts.items() if count > 1}
            self._requests = {model: count // 2 for model, count in requests.items() if count > 1}

    def blocks(self, prompt: Prompt, replicas: int) -> int:
        """Leading blocks that more than ``2 / replicas`` of the model's requests, or half, begin with.

        Rounded down to the last counted one (``MARKS``).
        """
        requests, keys = self._requests.get(prompt.model, 0), prompt.keys
        if requests < ENOUGH or not keys:
            return 0
        counts, least = self._counts, requests * min(MOST_OF_TRAFFIC, 2.0 / replicas)
        if counts.get(keys[0], 0) <= least:
            return 0
        return _last_mark(keys, counts, least) + 1


def _last_mark(keys: Sequence[int], counts: dict[int, int], least: float) -> int:
    """The last counted block that more than ``least`` begin with; the first one is."""
    low, high = 0, len(MARKS)
    while high - low > 1:
        middle = (low + high) // 2
        mark = MARKS[middle]
        if mark < len(keys) and counts.get(keys[mark], 0) > least:
            low = middle
        else:
            high = middle
    return MARKS[low]
