"""All caches: what is forgotten and when: tails first, never what is held, everything at a reset."""

import random

import pytest

from replica.contract.kv_events import CacheCleared
from replica.sequence import Sequence
from tests.replica.cache_steps import PREFIX, hit, request, run, start, whole
from tests.replica.caches import CACHES, snapshot


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def test_what_somebody_holds_is_never_evicted(make):
    cache = make(64)
    a = request("a", [*PREFIX, 1])
    start(cache, a)
    for number in range(20):
        assert run(cache, request(f"{number}", [number] * 40)) == 0
        cache.check_invariants([a])
    assert hit(cache, PREFIX) == 20
    # 64 in all, a holds 21: 43 tokens (40 in blocks of four) and not one more.
    most = cache.free_blocks * cache.block_size
    b = request("b", [7] * (most + 1))
    assert not cache.adopt(b, cache.match(b))
    b = request("b", [8] * most)
    assert cache.adopt(b, cache.match(b)) and cache.free_blocks == 0


def test_a_tail_goes_before_its_head_and_the_least_recent_first(make):
    cache = make(44)
    run(cache, request("old", PREFIX))
    run(cache, request("young", range(500, 520)))
    lost = []
    for number in range(1, 6):  # the first finds 4 tokens never used, the others evict all they need
        run(cache, request("new", [number] * (4 * number), salt=f"{number}"))
        lost.append((20 - hit(cache, PREFIX), 20 - hit(cache, range(500, 520))))
    assert lost == [(0, 0), (8, 0), (20, 0), (20, 16), (20, 20)]


def test_a_hit_makes_the_whole_prefix_young_again(make):
    cache = make(40)
    run(cache, request("first", PREFIX))
    run(cache, request("second", range(500, 520)))
    run(cache, request("first again", [*PREFIX[:16], 3]))
    run(cache, request("new", [9] * 16))
    assert hit(cache, PREFIX[:16]) == 16 and hit(cache, range(500, 520)) < 20


def test_reset_only_while_nobody_holds_anything(make):
    cache = make(64, record_events=True)
    a = request("a", [*PREFIX, 1])
    start(cache, a)
    before = snapshot(cache)
    assert cache.reset() is False and snapshot(cache) == before
    cache.release(a)
    cache.take_events()
    assert cache.reset() is True and cache.take_events() == [CacheCleared()]
    assert hit(cache, PREFIX) == 0 and whole(cache) and not list(cache.cached_hashes())
    assert run(cache, request("b", [*PREFIX, 1])) == 0


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_strands_nothing_and_leaks_nothing(make, seed):
    rng = random.Random(seed)
    cache = make(96)
    running: list[Sequence] = []
    seen_hits = 0
    for number in range(400):
        while running and (len(running) > 3 or rng.random() < 0.4):
            cache.release(running.pop(rng.randrange(len(running))))
        tokens = [*PREFIX[: rng.randrange(21)], *[rng.randrange(3) for _ in range(rng.randrange(1, 9))]]
        sequence = request(f"{number}", tokens, salt=rng.choice([None, "x"]))
        found = start(cache, sequence)
        if found is not None:
            running.append(sequence)
            seen_hits += found
        assert cache.stranded_tokens() == 0
        cache.check_invariants(running)
    assert seen_hits > 1_000
    for sequence in running:
        cache.release(sequence)
    assert whole(cache)
