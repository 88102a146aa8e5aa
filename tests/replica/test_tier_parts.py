"""The parts tiers are decided with: measured speed, write budget, health, shelf, fetch or recompute."""

import doctest
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract import transfer_speed
from replica.contract.prefill_cost import PrefillCost
from replica.contract.transfer_speed import TransferSpeed
from replica.kv_cache import fetch_plan, tier_health, tier_settings, tier_shelf, write_budget
from replica.kv_cache.fetch_plan import Tier, TierSpeed, plan_fetch
from replica.kv_cache.tier_health import LONGEST_PAUSE_S, TierHealth
from replica.kv_cache.tier_shelf import TierShelf
from replica.kv_cache.write_budget import DAY_S, WriteBudget


@pytest.mark.parametrize(
    "documented", [fetch_plan, tier_health, tier_settings, tier_shelf, transfer_speed, write_budget]
)
def test_doctests(documented):
    assert doctest.testmod(documented).failed == 0


# Measured speed

sizes = st.integers(0, 10**9)


@given(
    latency_s=st.floats(0, 0.5),
    rate=st.floats(1e6, 1e11),
    measured=st.lists(st.tuples(sizes, st.floats(0, 100), st.floats(0, 1_000)), max_size=40),
    small=sizes,
    large=sizes,
)
def test_speed_is_never_negative_and_grows_with_size(latency_s, rate, measured, small, large):
    speed = TransferSpeed(latency_s, rate)
    for size, seconds, now in measured:
        speed.observe(size, seconds, now)
    small, large = sorted((small, large))
    for now in (0.0, 500.0, 5_000.0):
        fitted_latency_s, seconds_per_byte = speed.fit(now)
        assert fitted_latency_s >= 0 and seconds_per_byte >= 0
        assert speed.seconds(small, now) <= speed.seconds(large, now)


@given(
    latency_s=st.floats(1e-5, 0.1), rate=st.floats(1e7, 1e10), sizes=st.lists(sizes, min_size=8, max_size=8)
)
def test_a_true_line_is_found(latency_s, rate, sizes):
    speed = TransferSpeed(0.01, 1e8)
    for turn in range(60):
        for size in sizes:
            speed.observe(size, latency_s + size / rate, now=float(turn))
    if max(sizes) - min(sizes) > 10**8:
        expected = latency_s + max(sizes) / rate
        assert speed.seconds(max(sizes), 60.0) == pytest.approx(expected, rel=0.1, abs=0.02)


def test_equal_sizes_do_not_break_the_fit():
    speed = TransferSpeed(0.001, 1e9)
    for turn in range(1_000):
        speed.observe(2_000_000, 0.5, now=float(turn))
    assert speed.seconds(2_000_000, 1_000.0) == pytest.approx(0.5, rel=0.05)


def test_time_never_runs_backwards_for_it():
    speed = TransferSpeed(0.001, 1e9)
    speed.observe(10, 5.0, now=100.0)
    speed.observe(10, 5.0, now=50.0)
    assert speed.seconds(10, 0.0) == speed.seconds(10, 100.0)


@pytest.mark.parametrize(("latency_s", "rate"), [(-1, 1e9), (0, 0), (0, -5)])
def test_senseless_speeds_are_refused(latency_s, rate):
    with pytest.raises(ValueError):
        TransferSpeed(latency_s, rate)


# Write budget


@given(
    daily=st.integers(0, 10_000),
    burst=st.one_of(st.none(), st.integers(0, 20_000)),
    asked=st.lists(st.tuples(st.floats(0, DAY_S / 3), st.integers(0, 2_000)), max_size=60),
)
def test_no_day_exceeds_its_budget(daily, burst, asked):
    now = 1_000.0
    budget = WriteBudget(daily, now, burst)
    granted = []
    for pause_s, size in asked:
        now += pause_s
        if budget.take(size, now):
            granted.append((now, size))
    for begin, _ in granted:
        assert sum(size for at, size in granted if begin <= at < begin + DAY_S) <= daily * (1 + 1e-9)
    assert budget.spent_bytes == sum(size for _, size in granted)


def test_the_budget_is_there_to_be_used():
    budget = WriteBudget(24_000, 0.0)
    granted = sum(1_000 for second in range(0, int(DAY_S), 60) if budget.take(1_000, float(second)))
    assert 22_000 <= granted <= 24_000


# Health


def test_pauses_grow_to_a_limit_and_shrink_when_it_works():
    health = TierHealth()
    now, pauses = 0.0, []
    for _ in range(12):
        health.failed(now)
        began = now
        while not health.usable(now):
            now += 0.5
        pauses.append(now - began)
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0] and pauses[-1] == LONGEST_PAUSE_S
    assert all(a <= b for a, b in pairwise(pauses))
    health.worked()
    health.failed(now)
    assert health.usable(now + 1.0)


def test_many_failures_at_once_are_one_pause():
    health = TierHealth()
    for _ in range(50):
        health.failed(now=5.0)
    assert health.usable(6.0) and health.failures == 50


# Shelf


def test_a_shelf_is_used_least_recent_first():
    shelf = TierShelf(3)
    for name in "abc":
        shelf.reserve(name)
        shelf.written(name, None)
    shelf.touch("a")
    assert list(shelf.oldest()) == ["b", "c", "a"] == shelf.coldest(5)
    shelf.pin("b")
    assert list(shelf.oldest()) == ["c", "a"] and shelf.coldest(2) == ["b", "c"]


def test_doomed_entries_live_until_the_last_copy_ends():
    shelf = TierShelf(2)
    shelf.reserve("a")
    shelf.written("a", 5)
    shelf.pin("a")
    shelf.pin("a")
    assert shelf.doom("a") is False and not shelf.readable("a") and shelf.room == 1
    with pytest.raises(ValueError, match="not here whole"):
        shelf.pin("a")
    assert shelf.unpin("a") is False
    shelf.check_invariants()
    assert shelf.unpin("a") is True and "a" not in shelf


def test_a_failed_write_leaves_nothing():
    shelf = TierShelf(1)
    shelf.reserve("a")
    assert shelf.arriving("a") and not shelf.readable("a")
    assert shelf.not_written("a") is True and shelf.room == 1


def test_copies_that_never_began_cannot_end():
    shelf = TierShelf(2)
    with pytest.raises(ValueError, match="never began"):
        shelf.written("a", None)
    shelf.reserve("a")
    with pytest.raises(ValueError, match="not here whole"):
        shelf.pin("a")
    shelf.written("a", None)
    for end in (shelf.unpin, shelf.not_written):
        with pytest.raises(ValueError, match="never began"):
            end("a")


# Fetch or recompute

COST = PrefillCost(fixed_s=0.004, per_token_s=31e-6)
BLOCK_BYTES = 16 * 131_072


def plan(tokens, start, reach, speeds, **options):
    return plan_fetch(tokens, start, reach, speeds, COST, block_tokens=16, block_bytes=BLOCK_BYTES, **options)


def fast(tier, bytes_per_s=20e9, latency_s=1e-4):
    return {tier: TierSpeed(latency_s, 1 / bytes_per_s)}


@given(
    tokens=st.integers(1, 5_000),
    start=st.integers(0, 40),
    reach=st.lists(st.sampled_from([Tier.HOST, Tier.DISK]), max_size=120),
    rates=st.tuples(st.floats(1e6, 1e12), st.floats(1e6, 1e12)),
    latency_s=st.floats(0, 1),
    layers=st.integers(1, 80),
    wait_s=st.floats(0, 2),
)
def test_a_plan_is_never_worse_than_recomputing_and_leaves_a_token(
    tokens, start, reach, rates, latency_s, layers, wait_s
):
    speeds = {
        tier: TierSpeed(latency_s, 1 / rate) for tier, rate in zip((Tier.HOST, Tier.DISK), rates, strict=True)
    }
    tokens = max(tokens, start * 16 + 1)
    found = plan(tokens, start, reach, speeds, layers=layers, wait_s=wait_s)
    assert found.sources == tuple(reach[: len(found.sources)])
    assert found.stop_block * 16 < tokens or not found.sources
    assert len(found.sources) <= found.within_reach <= len(reach)
    assert found.seconds <= found.recompute_s
    assert found.recompute_s == pytest.approx(wait_s + COST.seconds(tokens - 16 * start, 16 * start))
    if found.sources:
        assert found.seconds <= wait_s + 0.95 * (found.recompute_s - wait_s) + 1e-12
        # Given up at the last moment, then computed: no more than the prefill again on top.
        assert 0 < found.give_up_s <= found.recompute_s


@given(rate=st.floats(1e8, 1e11), tokens=st.integers(100, 4_000), more=st.floats(1.0, 50.0))
def test_a_faster_tier_is_never_used_less(rate, tokens, more):
    reach = [Tier.DISK] * (tokens // 16)
    slow, quick = (plan(tokens, 0, reach, fast(Tier.DISK, r)) for r in (rate, rate * more))
    assert len(quick.sources) >= len(slow.sources) and quick.seconds <= slow.seconds + 1e-12


def test_break_even_is_where_fetching_costs_what_computing_does():
    """31 µs a token and more with position against 16 * 131,072 bytes per 16 tokens: about 4.3 GB/s."""
    reach = [Tier.DISK] * 62
    rates = [r * 1e8 for r in range(20, 80)]
    first = next(r for r in rates if plan(1_000, 0, reach, fast(Tier.DISK, r), least_gain=0.0).sources)
    assert first == pytest.approx(131_072 / 31e-6, rel=0.1)


def test_waiting_hides_the_fetch():
    reach = [Tier.DISK] * 62
    assert plan(1_000, 0, reach, fast(Tier.DISK, 2e9)).sources == ()
    found = plan(1_000, 0, reach, fast(Tier.DISK, 2e9), wait_s=1.0)
    assert len(found.sources) == 62 and found.seconds == pytest.approx(1.0 + COST.seconds(8, 992))


def test_layers_hide_it_behind_computing():
    reach = [Tier.HOST] * 62
    one, many = (plan(2_000, 0, reach, fast(Tier.HOST, 10e9), layers=n) for n in (1, 40))
    assert many.seconds < one.seconds < one.recompute_s


def test_a_latency_that_eats_the_gain_is_not_paid():
    assert plan(100, 0, [Tier.PEER] * 6, fast(Tier.PEER, latency_s=0.02)).sources == ()
    assert plan(4_000, 0, [Tier.PEER] * 249, fast(Tier.PEER, latency_s=0.02)).sources


def test_the_slow_end_of_a_reach_is_left():
    reach = [Tier.HOST] * 40 + [Tier.DISK] * 22
    found = plan(1_000, 0, reach, fast(Tier.HOST) | fast(Tier.DISK, 5e8))
    assert found.sources == (Tier.HOST,) * 40 and found.within_reach == 62


def test_nothing_within_reach_or_nothing_missing():
    assert plan(1_000, 3, [], {}).sources == ()
    found = plan(64, 4, [Tier.HOST], fast(Tier.HOST))  # all but nothing is left to compute
    assert found.sources == () and found.within_reach == 0
