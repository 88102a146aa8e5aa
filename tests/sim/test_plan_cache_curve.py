"""Stack distances against caches that are really kept, block by block."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sim.bounds import InfiniteCache
from sim.plan.cache_curve import cache_curve, coarser
from sim.workload.chat_mix import chat_trace
from sim.workload.sources import open_trace
from sim.workload.trace import Trace, TraceRequest

SIZE = 16


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Prompts that branch: a path in a tree of blocks names a block by everything before it."""
    paths = draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=40))
    requests = []
    for path in paths:
        ids = tuple(int("1" + "".join(map(str, path[: depth + 1])), 3) for depth in range(len(path)))
        tail = draw(st.integers(0, SIZE - 1))
        requests.append(TraceRequest(len(ids) * SIZE + tail, 1, ids))
    return Trace("tree", SIZE, tuple(requests))


def lru_hit_tokens(trace: Trace, blocks: int) -> int:
    kept: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for request in trace.requests:
        found = 0
        for block in request.block_ids:
            if block not in kept:
                break
            found += 1
        hits += min(found, (request.prompt_tokens - 1) // trace.block_tokens)
        for block in reversed(request.block_ids):
            kept[block] = None
            kept.move_to_end(block)
        while len(kept) > blocks:
            kept.popitem(last=False)
    return hits * trace.block_tokens


@settings(max_examples=60, deadline=None)
@given(traces(), st.integers(1, 60))
def test_any_capacity_has_the_hits_of_an_lru_cache(trace: Trace, blocks: int) -> None:
    assert cache_curve(trace).hit_tokens(blocks * SIZE) == lru_hit_tokens(trace, blocks)


@settings(max_examples=60, deadline=None)
@given(traces(), st.sampled_from([0.1, 0.5, 0.9, 0.99, 1.0]))
def test_the_capacity_for_a_share_is_the_smallest(trace: Trace, share: float) -> None:
    curve = cache_curve(trace)
    capacity = curve.capacity_for(share)
    assert curve.hit_tokens(capacity) >= share * curve.ideal_tokens
    if curve.ideal_tokens:
        assert curve.hit_tokens(capacity - SIZE) < share * curve.ideal_tokens


def test_the_ideal_is_the_infinite_caches() -> None:
    trace = open_trace("mooncake")
    cache = InfiniteCache(trace.block_tokens)
    hits = sum(cache.arrived(one.block_ids, one.prompt_tokens) for one in trace.requests)
    curve = cache_curve(trace)
    assert curve.ideal_tokens == hits
    assert curve.hit_tokens(curve.unique_tokens) == hits


@pytest.mark.parametrize("blocks", [2, 4])
def test_larger_blocks_match_less(blocks: int) -> None:
    trace = chat_trace(seed=3).head(300)
    fine, coarse = cache_curve(trace), cache_curve(coarser(trace, blocks))
    assert coarse.block_tokens == blocks * trace.block_tokens
    assert 0 < coarse.ideal_tokens < fine.ideal_tokens
    assert coarse.ideal_tokens > fine.ideal_tokens - len(trace.requests) * coarse.block_tokens
