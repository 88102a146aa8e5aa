"""Pins of hot prefixes: what a burst of strangers cannot take, and how they give way."""

import doctest

import pytest

from replica import hot_prefixes as module
from replica.hot_prefixes import AGE_AFTER, MOST_COUNTED, HotPrefixes
from replica.kv_cache.prefix_cache import PrefixCache
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from tests.replica.cache_steps import compute, hit, run
from tests.replica.caches import CACHES
from tests.replica.test_scheduler import add, names
from tests.replica.toy_engine import ToyEngine, expected_output

SYSTEM = list(range(1_000, 1_032))
"""32 tokens: a system prompt."""


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def ask(cache, hot, name, tokens, **options):
    sequence = Sequence(name, tokens, 1, **options)
    assert cache.adopt(sequence, cache.match(sequence))
    hot.admitted(sequence)
    compute(cache, sequence)
    cache.release(sequence)
    hot.check_invariants()
    cache.check_invariants(hot.holders)


def in_blocks(cache, tokens):
    return tokens // cache.block_size


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_a_prefix_is_held_after_so_many_matches_ended_there(make):
    cache = make(256)
    hot = HotPrefixes(cache, in_blocks(cache, 64), hot_after=3)
    held = []
    for number in range(5):
        ask(cache, hot, f"{number}", [*SYSTEM, number, number, number, number, number])
        held.append(hot.blocks * cache.block_size)
    assert held == [0, 0, 0, 32, 32]
    for number in range(10):
        run(cache, Sequence("stranger", [number] * 200, 1))
    assert hit(cache, SYSTEM) == 32
    hot.clear()
    for number in range(10):
        run(cache, Sequence("stranger", [number] * 200, 1))
    assert hit(cache, SYSTEM) == 0 and cache.free_blocks == cache.blocks


def test_a_conversation_that_goes_on_is_not_hot(make):
    cache = make(1_024)
    hot = HotPrefixes(cache, in_blocks(cache, 512), hot_after=2)
    text = list(range(40))
    for turn in range(10):
        ask(cache, hot, f"{turn}", text)
        text += range(100 * turn, 100 * turn + 40)
    assert hot.blocks == 0  # every match ended somewhere else


def test_the_hotter_replaces_the_colder_within_the_bound(make):
    cache = make(512)
    hot = HotPrefixes(cache, in_blocks(cache, 48), hot_after=2)
    for name, times in (("a", 3), ("b", 6)):
        for number in range(times):
            ask(cache, hot, name, [ord(name)] * 32 + [number] * 8)
    assert hot.blocks * cache.block_size == 32
    assert [pin.token_ids[0] for pin in hot.holders] == [ord("b")]
    for number in range(10):
        ask(cache, hot, "too long", [ord("c")] * 64 + [number] * 8)
    assert [pin.token_ids[0] for pin in hot.holders] == [ord("b")]


def test_salted_prefixes_are_told_apart(make):
    cache = make(512)
    hot = HotPrefixes(cache, in_blocks(cache, 128), hot_after=2)
    for number in range(2):
        for salt in ("x", "y"):
            ask(cache, hot, salt, [*SYSTEM, number], salt=salt)
    assert hot.blocks == 0  # one match each
    ask(cache, hot, "x", [*SYSTEM, 9], salt="x")
    assert [pin.salt for pin in hot.holders] == ["x"] and hit(cache, SYSTEM, salt="x") == 32


def test_heat_fades(make):
    cache = make(512)
    hot = HotPrefixes(cache, in_blocks(cache, 64), hot_after=2)
    for number in range(3):
        ask(cache, hot, "a", [*SYSTEM, number])
    assert hot.blocks
    other = [5] * 16
    for number in range(2 * AGE_AFTER):
        ask(cache, hot, "b", [*other, number])
    assert [pin.token_ids[0] for pin in hot.holders] == [5]


def test_what_is_counted_is_bounded():
    cache = CACHES["blocks"](64)
    hot = HotPrefixes(cache, 4)
    for number in range(3 * MOST_COUNTED):
        sequence = Sequence("a", [number] * 17, 1)
        sequence.computed_tokens = 16  # as if that much had been found
        hot.admitted(sequence)
        hot.check_invariants()


def test_opaque_ids():
    cache = CACHES["blocks"](256)
    hot = HotPrefixes(cache, 8, hot_after=1)
    for number in range(2):
        sequence = Sequence.of_blocks("a", [1, 2, 3, 4, 10 + number], 20, 1, block_size=4)
        assert cache.adopt(sequence, cache.match(sequence))
        hot.admitted(sequence)
        compute(cache, sequence)
        cache.release(sequence)
    (pin,) = hot.holders
    assert pin.block_hashes == [1, 2, 3, 4] and hot.blocks == 4
    cache.check_invariants([pin])


def engine(make, tokens, pinned_tokens):
    cache = make(tokens)
    limits = SchedulerLimits(8, 32, 256, pinned_blocks=in_blocks(cache, pinned_tokens))
    return ToyEngine(Scheduler(cache, limits))


def heat(toy):
    for number in range(6):
        add(toy, f"hot{number}", [*SYSTEM, number, number], max_tokens=1)
        toy.drain()


def test_a_burst_of_strangers_costs_the_hot_prefix_only_without_pins(make):
    hits = []
    for pinned in (0, 64):
        toy = engine(make, 256, pinned)
        heat(toy)
        for number in range(20):
            add(toy, f"stranger{number}", [number] * 60, max_tokens=2)
        toy.drain()
        again = add(toy, "again", [*SYSTEM, 99], max_tokens=1)
        toy.drain()
        hits.append(again.cached_tokens)
        toy.scheduler.check_invariants()
    assert hits == [0, 32]


def test_pins_give_way_before_anybody_is_preempted(make):
    toy = engine(make, 64, 64)
    heat(toy)
    assert toy.scheduler.hot.blocks
    a = add(toy, "a", [1] * 20, max_tokens=30)  # fits beside the pin at first, later it needs the memory
    toy.drain()
    assert toy.scheduler.preemptions == 0 and not toy.scheduler.hot.blocks
    assert a.output_ids == expected_output([1] * 20, 30)


def test_pins_give_way_to_a_request_when_nothing_runs(make):
    toy = engine(make, 64, 64)
    heat(toy)
    big = add(toy, "big", [1] * 60, max_tokens=4)
    assert names(toy.drain()) == ["big"] and big.output_tokens == 4


def test_pins_make_a_request_wait_while_others_run(make):
    toy = engine(make, 96, 64)
    heat(toy)
    add(toy, "a", [1] * 30, max_tokens=6)
    toy.step()
    add(toy, "b", [2] * 40, max_tokens=1)  # 32 pinned and 31 or more of a: no room until a is done
    toy.step()
    assert names(toy.scheduler.running) == ["a"] and toy.scheduler.hot.blocks
    assert names(toy.drain()) == ["a", "b"] and toy.scheduler.hot.blocks


def test_reset_lets_go_of_them(make):
    toy = engine(make, 256, 64)
    heat(toy)
    assert toy.scheduler.hot.blocks and toy.scheduler.reset_cache() is True
    assert not toy.scheduler.hot.blocks and toy.scheduler.cache.free_blocks == toy.scheduler.cache.blocks


def test_a_reset_that_is_refused_for_a_load_in_flight_lets_go_of_no_pin():
    cache = PrefixCache(64, 16)
    limits = SchedulerLimits(max_running=4, max_batched_tokens=64, max_model_len=200, pinned_blocks=8)
    scheduler = Scheduler(cache, limits)
    for number in range(8):
        ask(cache, scheduler.hot, f"{number}", [*SYSTEM, number, number])
    pinned = scheduler.hot.blocks
    load = scheduler.loads.begin(Sequence("late", range(500, 540), 1), 32)
    assert scheduler.reset_cache() is False and scheduler.hot.blocks == pinned > 0
    scheduler.loads.end(load)
    assert scheduler.reset_cache() is True and scheduler.hot.blocks == 0 and cache.free_blocks == 64
