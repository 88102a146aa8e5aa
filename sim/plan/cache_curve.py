"""Hit rate against cache size, all sizes at once, from one trace's reuse distances."""

from bisect import bisect_right
from dataclasses import dataclass, replace
from itertools import chain

from sim.reuse_distance import reuse_distances
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
    prompts = [(request.block_ids, request.prompt_tokens) for request in trace.requests]
    distances = sorted(chain.from_iterable(reuse_distances(prompts, trace.block_tokens)))
    return CacheCurve(
        block_tokens=trace.block_tokens,
        prompt_tokens=sum(request.prompt_tokens for request in trace.requests),
        unique_tokens=len({block for ids, _ in prompts for block in ids}) * trace.block_tokens,
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
