"""Hit rate against cache size, all sizes at once: LRU stack distances (Mattson et al., 1970).

A block is a hit in an LRU cache exactly if fewer blocks than the cache holds were touched since its last
touch. A request touches its blocks last to first, so a head is always younger than its tail: hits are
prefixes, as in the replica's cache.
"""

from bisect import bisect_right
from dataclasses import dataclass, replace

from sim.workload.trace import Trace


@dataclass(frozen=True, slots=True)
class CacheCurve:
    """What caches of every size would have had of one trace, seen as a single stream of requests."""

    block_tokens: int
    prompt_tokens: int
    """Of all requests."""
    unique_tokens: int
    """In blocks that appear at least once: what an infinite cache would hold."""
    distances: tuple[int, ...]
    """Of every block that was seen before and may be a hit, in rising order: blocks a cache must hold."""

    @property
    def ideal_tokens(self) -> int:
        """Hit tokens of an infinite cache."""
        return len(self.distances) * self.block_tokens

    def hit_tokens(self, capacity_tokens: float) -> int:
        """Hit tokens of a cache of that size."""
        return bisect_right(self.distances, capacity_tokens // self.block_tokens) * self.block_tokens

    def capacity_for(self, of_ideal: float) -> int:
        """The smallest cache, in tokens, with this share of the ideal hits."""
        wanted = -(-len(self.distances) * of_ideal // 1)
        if wanted <= 0:
            return 0
        return self.distances[min(len(self.distances), int(wanted)) - 1] * self.block_tokens


def cache_curve(trace: Trace) -> CacheCurve:
    """The curve of a trace. Cost: ``n log n`` in blocks.

    Three blocks in turn; the second time round each was touched 3 blocks ago:

    >>> from sim.workload.trace import TraceRequest
    >>> ones = [TraceRequest(17, 1, (block,)) for block in (1, 2, 3, 1, 2, 3)]
    >>> curve = cache_curve(Trace("t", 16, tuple(ones)))
    >>> curve.distances, curve.hit_tokens(2 * 16), curve.hit_tokens(3 * 16), curve.capacity_for(0.9)
    ((3, 3, 3), 0, 48, 48)
    """
    touches = sum(len(request.block_ids) for request in trace.requests)
    live = _Counts(touches + 1)
    last: dict[int, int] = {}
    distances: list[int] = []
    clock = 0
    for request in trace.requests:
        usable = (request.prompt_tokens - 1) // trace.block_tokens
        known = [block for block in request.block_ids if block in last]
        for place, block in enumerate(known):
            if place < usable and request.block_ids[place] == block:
                distances.append(live.from_on(last[block]))
        for block in known:
            live.add(last[block], -1)
        for block in reversed(request.block_ids):
            clock += 1
            last[block] = clock
            live.add(clock, 1)
    distances.sort()
    return CacheCurve(
        block_tokens=trace.block_tokens,
        prompt_tokens=sum(request.prompt_tokens for request in trace.requests),
        unique_tokens=len(last) * trace.block_tokens,
        distances=tuple(distances),
    )


def coarser(trace: Trace, blocks: int) -> Trace:
    """The same trace with ``blocks`` of its blocks in one: what a larger block size would match.

    >>> from sim.workload.trace import TraceRequest
    >>> made = coarser(Trace("t", 16, (TraceRequest(80, 1, (1, 2, 3, 4, 5)),)), 2)
    >>> made.block_tokens, made.requests[0].block_ids
    (32, (2, 4))
    """
    requests = tuple(
        replace(request, block_ids=request.block_ids[blocks - 1 :: blocks]) for request in trace.requests
    )
    return Trace(trace.name, trace.block_tokens * blocks, requests)


class _Counts:
    """Sums over a range, one cell changed at a time (Fenwick tree)."""

    __slots__ = ("_cells", "_total")

    def __init__(self, size: int) -> None:
        self._cells = [0] * (size + 1)
        self._total = 0

    def add(self, place: int, change: int) -> None:
        self._total += change
        cells = self._cells
        while place < len(cells):
            cells[place] += change
            place += place & -place

    def from_on(self, place: int) -> int:
        """The sum from ``place`` to the end."""
        below = place - 1
        total = self._total
        while below > 0:
            total -= self._cells[below]
            below -= below & -below
        return total
