"""KV blocks and recurrent states behind one cache contract: a hit is a position every layer can restart from.

The KV of a prefix may be cached while the state at its end is not. A hit is then cut back to the deepest
position at which both are (the *restart boundary*); what KV lies beyond is computed again, and a state is
kept at its end, because other requests seem to branch there.

Blocks of 4 tokens. The first request keeps its state at 8, the last boundary in its 10 tokens; one that
shares all 10 restarts at 8. One that shares 6 finds KV for 4 tokens but no state there: it starts from zero,
and keeps one at 4:

>>> from replica.kv_cache.prefix_cache import PrefixCache
>>> cache = HybridCache(PrefixCache(16, block_size=4), StateCheckpoints(6))
>>> def prefill(name, tokens):
...     sequence, at, ends = Sequence(name, tokens, max_tokens=4), 0, []
...     _ = cache.adopt(sequence, cache.match(sequence))
...     ends.append(at := sequence.computed_tokens)
...     while at < sequence.total_tokens:
...         stop = cache.chunk_stop(sequence, sequence.total_tokens)
...         cache.states.ran(sequence, at, stop)                        # the runner's word
...         sequence.computed_tokens = at = stop
...         cache.publish(sequence); ends.append(at)
...     return ends
>>> prefill("a", range(10)), prefill("b", [*range(10), 77]), prefill("c", [*range(6), 88])
([0, 8, 10], [8, 11], [0, 4, 7])
>>> prefill("d", [*range(6), 99])
[4, 7]
"""

from collections.abc import Callable, Iterable, Sized
from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from replica.contract.kv_events import BlockHash, CacheEvent
from replica.kv_cache.cache import Evicted, KvCache
from replica.kv_cache.restart_boundaries import chunk_stop, restart_boundaries
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.sequence import Sequence

Matched = TypeVar("Matched", bound=Sized)


@dataclass(frozen=True, slots=True)
class HybridMatch(Generic[Matched]):
    """A restart boundary: KV up to it, and the name of the state there (None: position 0)."""

    kv: Matched
    state: BlockHash | None
    kv_tokens: int
    """Tokens whose KV is cached, boundary or not."""

    def __len__(self) -> int:
        return len(self.kv)


class _Course:
    """What a running sequence still wants to keep, and what it kept last while decoding."""

    __slots__ = ("boundaries", "rolling")

    def __init__(self, boundaries: list[int]) -> None:
        self.boundaries = boundaries
        self.rolling: BlockHash | None = None


class HybridCache:
    """``kv`` for the attention layers, ``states`` for the recurrent ones; see ``Cache``.

    The runner reports every row it ran to ``states.ran`` before ``commit``, and carries out
    ``states.take_orders`` before it runs a batch; nothing is kept that it did not report. While a sequence
    decodes, the state at its newest boundary is kept in place of the one before.
    """

    repeatable = False

    def __init__(
        self,
        kv: KvCache[Any],
        states: StateCheckpoints,
        *,
        units: Row[int] = (),
        interval: int | None = None,
        names: Callable[[Sequence], Row[BlockHash]] | None = None,
    ) -> None:
        """States are kept at multiples of ``units`` (tokens; see ``restart_boundaries``), default the hash's.

        ``names``: collision-proof names of the blocks of ``kv.hash_tokens``; default ``kv.block_hashes``.
        """
        self.kv = kv
        self.states = states
        self.block_size = kv.block_size
        self.hash_tokens = kv.hash_tokens
        self.enabled = kv.enabled
        self.counters = kv.counters
        self.units = tuple(units) or (kv.hash_tokens,)
        self.interval = interval
        wrong = [unit for unit in (*self.units, interval or kv.hash_tokens) if unit % kv.hash_tokens]
        if wrong:
            raise ValueError(f"states at multiples of {wrong} tokens: give multiples of {kv.hash_tokens}")
        self._names = names if names is not None else kv.block_hashes
        self._courses: dict[Sequence, _Course] = {}

    # Restart boundaries

    def match(self, sequence: Sequence) -> HybridMatch[Any]:
        """The deepest position short of the last token at which KV and state are both cached. Reads only."""
        kv = self.kv.match(sequence)
        kv_tokens = len(kv) * self.kv.block_size
        size = self.kv.hash_tokens
        names = self._names(sequence) if kv_tokens >= size else ()
        for block in range(kv_tokens // size, 0, -1):
            if self.states.checkpoint_position(names[block - 1]) is not None:
                kv = self.kv.shorten(kv, block * size // self.kv.block_size)
                return HybridMatch(kv, names[block - 1], kv_tokens)
        return HybridMatch(self.kv.shorten(kv, 0), None, kv_tokens)

    def fits(self, sequence: Sequence, matched: HybridMatch[Any], spare_blocks: int = 0) -> bool:
        """Whether ``adopt`` would succeed: blocks and a state slot."""
        return self.states.can_begin() and self.kv.fits(sequence, matched.kv, spare_blocks)

    def adopt(self, sequence: Sequence, matched: HybridMatch[Any], spare_blocks: int = 0) -> bool:
        """Hold the KV, take blocks for the rest, and a live state at the boundary; False: nothing changed."""
        if not self.states.can_begin() or not self.kv.adopt(sequence, matched.kv, spare_blocks):
            return False
        self.states.begin(sequence, matched.state)
        junction = matched.kv_tokens // self.kv.hash_tokens * self.kv.hash_tokens
        self._courses[sequence] = _Course(
            restart_boundaries(sequence.total_tokens, self.units, self.interval, [junction])
        )
        return True

    def hold(self, sequence: Sequence, matched: HybridMatch[Any]) -> None:
        """Hold the KV of what matched; a sequence that will not run needs no state."""
        self.kv.hold(sequence, matched.kv)

    def chunk_stop(self, sequence: Sequence, stop: int) -> int:
        """The first boundary on the way: only a step that ends there leaves its state in the slot."""
        stop = self.kv.chunk_stop(sequence, stop)
        return chunk_stop(sequence.computed_tokens, stop, self._courses[sequence].boundaries)

    def publish(self, sequence: Sequence) -> None:
        """Make computed KV hittable, and the state at this very position, if it is a boundary."""
        self.kv.publish(sequence)
        course = self._courses.get(sequence)
        position = sequence.computed_tokens
        if course is None or not self.enabled or position == 0 or position % self.hash_tokens:
            return
        decoding = position > course.boundaries[-1] if course.boundaries else True
        if position % min(self.units) if decoding else position not in course.boundaries:
            return
        names = self._names(sequence)
        if position // self.hash_tokens > len(names):
            return  # opaque ids do not name this output
        name = names[position // self.hash_tokens - 1]
        if self.states.publish(sequence, position, name, course.rolling) and decoding:
            lasting = self.interval is not None and position % self.interval == 0
            course.rolling = None if lasting else name

    def release(self, sequence: Sequence) -> None:
        """Take all blocks and the live state from a sequence."""
        self.kv.release(sequence)
        self.states.end(sequence)
        self._courses.pop(sequence, None)

    def reset(self) -> bool:
        """Forget every block and checkpoint; False, changing nothing, while a sequence holds any block."""
        if not self.kv.reset():
            return False
        self.states.forget_all()
        return True

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless KV and states agree on who runs."""
        holders = list(sequences)
        self.kv.check_invariants(holders)
        self.states.check_invariants()
        running = [sequence for sequence in holders if self.states.holds(sequence)]
        assert len(running) == self.states.inventory().live == len(self._courses)
        assert all(sequence in self._courses for sequence in running)

    # The KV cache's own

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.kv.blocks

    @property
    def free_blocks(self) -> int:
        """Blocks no sequence holds."""
        return self.kv.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""
        return self.kv.blocks_for(tokens)

    def extend(self, sequence: Sequence) -> bool:
        """Room for every token the sequence knows; False, changing nothing, when blocks are missing."""
        return self.kv.extend(sequence)

    def take_block(self, sequence: Sequence) -> None:
        """One more block at the end of the table. IndexError when none is free."""
        self.kv.take_block(sequence)

    def will_publish(self, owner: Sequence, sequence: Sequence, missing_block: int) -> bool:
        """Whether ``owner``'s prefill ends in a hit for ``sequence``; a state must be kept on the way too."""
        course = self._courses.get(owner)
        return (
            course is not None
            and any(position > missing_block * self.block_size for position in course.boundaries)
            and self.kv.will_publish(owner, sequence, missing_block)
        )

    def block_hashes(self, sequence: Sequence) -> Row[BlockHash]:
        """The chained hashes of the sequence's full blocks, or the ids that name them."""
        return self.kv.block_hashes(sequence)

    def take_events(self) -> list[CacheEvent]:
        """Events of the KV since the last call."""
        return self.kv.take_events()

    def take_evictions(self) -> list[Evicted]:
        """Evictions of KV since the last call."""
        return self.kv.take_evictions()

    def cached_hashes(self) -> Iterable[BlockHash]:
        """Block hashes whose KV is cached."""
        return self.kv.cached_hashes()

    def stranded_tokens(self) -> int:
        """Positions whose KV is resident but can never be matched."""
        return self.kv.stranded_tokens()
