"""What a replica shows of its speed: both parts of prefill and of a decode step, drift, outliers, error."""

import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.proxy.explanation import ENOUGH_SEEN, cost_fit
from router.routing.calibration import DEFAULT_DECODE, DEFAULT_PREFILL, ReplicaCost
from router.routing.cost_shape import AS_PREDICTED, CostShape
from router.routing.fleet_speed import FleetSpeed
from tests.router.small_fleet import prefilled

STEEP = PrefillCost(fixed_s=0.004, per_token_s=62.5e-6, attention_tokens=16_000.0)
"""Attention four times the prior's."""


def lengths(rng: random.Random) -> Iterator[tuple[int, int]]:
    """(new tokens, position) as traffic has them: short and long, cold and warm."""
    while True:
        prompt = int(min(60_000, rng.lognormvariate(8.5, 1.0))) + 10
        cached = rng.choice([0, 0, prompt // 2, prompt * 9 // 10])
        yield prompt - cached, cached


def show(
    cost: ReplicaCost,
    truth: PrefillCost,
    requests: int,
    rng: random.Random,
    noise: float = 0.1,
    now: float = 0.0,
) -> float:
    """``requests`` one after another, each as long as ``truth`` says, give or take; when the last ended."""
    for _, (new, position) in zip(range(requests), lengths(rng), strict=False):
        end = now + truth.seconds(new, position) * rng.lognormvariate(0.0, noise)
        prefilled(cost, now, end, new, position)
        now = end + 0.01
    return now


def off(cost: ReplicaCost, truth: PrefillCost, new: int, position: int = 0) -> float:
    return cost.prefill_s(new, position) / truth.seconds(new, position)


def test_attention_is_learned_beside_the_speed() -> None:
    cost = ReplicaCost(FleetSpeed())
    truth = PrefillCost(3 * STEEP.fixed_s, 3 * STEEP.per_token_s, STEEP.attention_tokens)  # slower, too
    show(cost, truth, 400, random.Random(1))
    for new, position in ((1_000, 0), (5_000, 0), (40_000, 0), (2_000, 30_000)):
        assert off(cost, truth, new, position) == pytest.approx(1.0, abs=0.2)
    assert 14_000 < cost.fit.attention_tokens < 26_000
    assert cost.fit.prefill_error < 0.2


def test_nothing_is_said_of_errors_before_there_is_enough_to_say() -> None:
    cost = ReplicaCost(FleetSpeed())
    show(cost, STEEP, ENOUGH_SEEN - 1, random.Random(5))
    assert cost_fit(cost)["prefill_error"] is None and cost_fit(cost)["step_error"] is None
    show(cost, STEEP, 1, random.Random(6))
    assert cost_fit(cost)["prefill_error"] == pytest.approx(cost.fit.prefill_error, abs=1e-4)


def test_a_shape_that_is_right_stays() -> None:
    cost = ReplicaCost(FleetSpeed())
    show(cost, DEFAULT_PREFILL, 400, random.Random(2), noise=0.3)
    assert cost.fit.attention_tokens == pytest.approx(DEFAULT_PREFILL.attention_tokens, rel=0.25)
    assert off(cost, DEFAULT_PREFILL, 1_000) == pytest.approx(1.0, abs=0.15)


SMALL = PrefillCost(fixed_s=0.008, per_token_s=10e-6, attention_tokens=8_000.0)
"""A small model: the fixed part twice the prior's, a token a sixth."""


def test_a_fixed_part_is_learned_beside_the_speed() -> None:
    cost = ReplicaCost(FleetSpeed())
    rng = random.Random(9)
    now = 0.0
    for _ in range(400):
        new = rng.choice([30, 100, 300, 1_500, 4_000])
        start, now = now, now + SMALL.seconds(new) * rng.lognormvariate(0.0, 0.1)
        prefilled(cost, start, now, new)
    for new in (30, 300, 1_500, 4_000):
        assert off(cost, SMALL, new) == pytest.approx(1.0, abs=0.2)


def test_equal_replicas_that_do_unlike_work_are_believed_equal() -> None:
    """One serves short warm prompts, one long cold ones, as affinity has it; neither is faster."""
    fleet = FleetSpeed()
    warm, cold = ReplicaCost(fleet), ReplicaCost(fleet)
    rng = random.Random(10)
    now = 0.0
    for _ in range(400):
        for cost, new, position in (
            (warm, rng.randint(20, 200), 1_500),
            (cold, rng.randint(1_000, 3_000), 0),
        ):
            seconds = SMALL.seconds(new, position) * rng.lognormvariate(0.0, 0.1)
            prefilled(cost, now, now + seconds, new, position)
        now += 1.0
    for new, position in ((100, 1_500), (2_000, 0)):
        believed = warm.prefill_s(new, position), cold.prefill_s(new, position)
        assert max(believed) < 1.25 * min(believed)
        assert believed[0] == pytest.approx(SMALL.seconds(new, position), rel=0.3)


def test_a_new_replica_takes_the_shape_of_the_others() -> None:
    fleet = FleetSpeed()
    show(ReplicaCost(fleet), STEEP, 400, random.Random(3))
    assert off(ReplicaCost(fleet), STEEP, 40_000) == pytest.approx(1.0, abs=0.2)


def test_unlike_replicas_are_told_apart() -> None:
    fleet = FleetSpeed()
    one, other = ReplicaCost(fleet), ReplicaCost(fleet)
    rng = random.Random(4)
    slow = PrefillCost(0.016, 250e-6, 16_000.0)
    for _ in range(20):
        show(one, DEFAULT_PREFILL, 20, rng)
        show(other, slow, 20, rng)
    for new in (1_000, 30_000):
        assert off(one, DEFAULT_PREFILL, new) == pytest.approx(1.0, abs=0.2)
        assert off(other, slow, new) == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize("busy", [True, False])
def test_what_an_idle_one_showed_counts_less_the_more_the_others_do_and_a_busy_one_s_does_not(
    busy: bool,
) -> None:
    fleet = FleetSpeed()
    slow, other = ReplicaCost(fleet), ReplicaCost(fleet)
    rng = random.Random(6)
    show(other, DEFAULT_PREFILL, 20, rng)
    now = show(slow, PrefillCost(0.016, 250e-6, 64_000.0), 20, rng)
    before = slow.prefill_s(1_000, 0)
    if busy:
        slow.prefill_started(now)  # a prompt that takes as long as all of the others'
    for _ in range(4):
        now = show(other, DEFAULT_PREFILL, 20, rng, now=now)
        slow.fade(now)
    after = slow.prefill_s(1_000, 0)
    if busy:
        assert after == pytest.approx(before, rel=0.05)
    else:
        assert other.prefill_s(1_000, 0) < after < 0.8 * before


def test_drift_is_followed() -> None:
    cost = ReplicaCost(FleetSpeed())
    rng = random.Random(5)
    now = show(cost, DEFAULT_PREFILL, 200, rng)
    slower = PrefillCost(0.008, 125e-6, 64_000.0)
    show(cost, slower, 25, rng, now=now)
    assert cost.fit.prefill_error > 0.1, "the error shows the change at once"
    show(cost, slower, 200, rng, now=now + 100.0)
    assert off(cost, slower, 4_000) == pytest.approx(1.0, abs=0.15) and cost.fit.prefill_error < 0.2


def test_a_few_absurd_lessons_bend_little() -> None:
    cost = ReplicaCost(FleetSpeed())
    rng = random.Random(6)
    now = show(cost, DEFAULT_PREFILL, 200, rng)
    before = cost.fit.attention_tokens
    prefilled(cost, now, now + 60.0, 100)  # a pause of a minute on a short prompt
    show(cost, DEFAULT_PREFILL, 3, rng, now=now + 61.0)
    assert cost.fit.attention_tokens == pytest.approx(before, rel=0.5)


def test_a_decode_step_is_learned_against_its_batch() -> None:
    cost = ReplicaCost(FleetSpeed())
    rng = random.Random(7)
    truth = DecodeCost(0.008, 240e-6)  # a sequence costs four times the prior's
    for _ in range(1_600):
        sequences = rng.randint(1, 120)
        cost.decoded(100 * truth.step_seconds(sequences) * rng.lognormvariate(0.0, 0.1), 100, sequences)
    for sequences in (1, 30, 120):
        assert cost.step_s(sequences) == pytest.approx(truth.step_seconds(sequences), rel=0.2)
    assert cost.fit.step_per_sequence_s > 2.5 * DEFAULT_DECODE.per_sequence_s and cost.fit.step_error < 0.2


def test_what_was_learned_can_be_taken_up() -> None:
    one, other = ReplicaCost(FleetSpeed()), ReplicaCost(FleetSpeed())
    show(one, STEEP, 300, random.Random(8))
    other.resumed(one.learned)
    assert off(other, STEEP, 40_000) == pytest.approx(1.0, abs=0.3)
    absurd = one.learned._replace(prefill=(1e9, 1.0), prefills=10_000)
    other.resumed(absurd)
    assert other.prefills_seen == one.prefills_seen, "not believed"


SECONDS = st.floats(1e-9, 1e3)
SEEN = st.just(0.0) | st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(SEEN, SECONDS, SECONDS, SECONDS), max_size=60))
@settings(deadline=None)
def test_whatever_is_seen_parts_are_bounded_and_more_work_costs_more(
    lessons: list[tuple[float, float, float, float]],
) -> None:
    shape = CostShape()
    for seen, first, second, third in lessons:
        shape.learn(seen, first, second, third)
        parts = shape.fit(AS_PREDICTED)
        assert parts.pair == parts.bounded.pair
        assert shape.level(1.0, parts, CostShape()) > 0.0


@given(
    st.lists(
        st.tuples(st.floats(1e-3, 100.0), st.integers(1, 100_000), st.integers(0, 100_000)),
        min_size=1,
        max_size=60,
    ),
    st.floats(1e-3, 1e3),
)
@settings(deadline=None)
def test_scaling_all_times_scales_what_is_learned(
    requests: list[tuple[float, int, int]], factor: float
) -> None:
    """Times and prior ``factor`` times as long: predictions, too."""
    costs = []
    for scale in (1.0, factor):
        prior = PrefillCost(0.004 * scale, 62.5e-6 * scale, 64_000.0)
        cost = ReplicaCost(FleetSpeed(), prior)
        cost._fleet.work.keep(scale)
        now = 0.0
        for seconds, new, position in requests:
            start, now = now, now + seconds * scale
            prefilled(cost, start, now, new, position)
        costs.append(cost.prefill_s(5_000, 1_000))
    assert costs[1] == pytest.approx(factor * costs[0], rel=1e-3)
