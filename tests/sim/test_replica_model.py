"""A step time read from a run, and one that varies as that run did."""

import random
from dataclasses import replace
from statistics import fmean, median

import pytest

from replica.batch import Batch, Work
from replica.contract.cost_fit import FitError
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from replica.sequence import Sequence
from sim.bench.replica_model import ReplicaModel, found_idle, replica_model, tuned
from sim.contender import contender
from sim.outcome import Outcome
from sim.simulate import run_once
from sim.simulation_settings import SimulationSettings
from sim.step_time.noisy import ALIKE, NoisyStepTime, Sample
from sim.step_time.presets import PRESETS
from sim.workload.arrivals import plan_arrivals
from sim.workload.trace import Trace
from tests.sim.traces import poisson

TRUE = PrefillCost(fixed_s=0.006, per_token_s=20e-6, attention_tokens=2_000.0)
STEP_S = 0.002


def run(seed: int, requests: int = 200, *, gap_s: float = 1.0) -> list[Outcome]:
    """Requests to two replicas in turn; every fourth prefill takes twice as long."""
    rng = random.Random(seed)
    made = []
    for number in range(requests):
        prompt, cached = rng.randrange(100, 1_500), rng.choice((0, 64))
        ttft_s = TRUE.seconds(prompt - cached, cached) * (2.0 if number % 8 > 5 else 1.0)
        made.append(
            Outcome(number * gap_s, prompt, 11, cached, ttft_s, ttft_s + 10 * STEP_S, replica=number % 2)
        )
    return made


def prefill(tokens: int) -> Batch:
    return Batch((Work(Sequence("a", (), 1), 0, tokens, True),), 0, 0, tokens)


def test_what_a_run_took_is_what_the_model_takes() -> None:
    model = replica_model([run(1), run(2)], DecodeCost(0.001, 0.0))
    assert model.decode.step_seconds(1) == pytest.approx(STEP_S)
    step_time = model.step_time(1)
    for tokens in (200, 1_000):
        drawn = [step_time.seconds(prefill(tokens)) for _ in range(400)]
        true_s = TRUE.seconds(tokens)
        assert median(drawn) == pytest.approx(true_s, rel=0.1)
        assert fmean(drawn) == pytest.approx(1.25 * true_s, rel=0.1)


def test_a_prefill_takes_what_was_measured_where_a_decode_step_takes_longer_than_its_fixed_part() -> None:
    """A short one, after a hit, took a decode step's time more: that made smollm2's hits 12% slower."""
    decode = DecodeCost(3.0 * TRUE.fixed_s, 0.001)
    step_time = ReplicaModel(TRUE, FitError(0.0, 0.0), decode, ()).step_time(1)
    assert step_time.seconds(prefill(100)) == pytest.approx(TRUE.seconds(100))
    assert step_time.seconds(Batch((), 2, 0, 0)) == pytest.approx(decode.step_seconds(2))


def test_requests_that_found_others_tell_nothing() -> None:
    crowded = run(1, gap_s=0.001)
    assert len(found_idle(crowded)) < len(crowded) / 4
    failed = [Outcome(0.0, 100, 0, 0, None, 0.1, 0, error="status 500")]
    assert found_idle(failed) == []
    with pytest.raises(ValueError, match="expected at least two lengths"):
        replica_model([failed], DecodeCost(0.001, 0.0))


def test_who_was_slow_counts_though_another_came_meanwhile() -> None:
    """Every 50 ms one to each replica: the slow are still there then. Taken alone, the quick looked usual."""
    busy = run(1, gap_s=0.025)
    prefills = [1.25 * TRUE.seconds(o.prompt_tokens - o.cached_tokens, o.cached_tokens) for o in busy]
    found = found_idle(busy)
    assert 0.4 * len(busy) < len(found) < len(busy)
    assert fmean(o.ttft_s or 0.0 for o in found) == pytest.approx(fmean(prefills), rel=0.1)


def test_steps_are_as_long_as_makes_the_measured_runs_decode_as_long_as_they_did() -> None:
    """Two at once on one replica: what both wait for is no longer steps, but each other's prompts."""
    trace = poisson(200, 0.05, [200, 900], seed=1)
    trace = replace(trace, requests=tuple(replace(one, output_tokens=12) for one in trace.requests))
    plan = plan_arrivals(trace)
    true = replica_model([run(1), run(2)], DecodeCost(0.006, 0.0005))

    def simulated(model: ReplicaModel, sent: Trace) -> list[Outcome]:
        settings = SimulationSettings(step_time=model.step_time(1))
        return run_once(sent, plan, contender("round_robin"), 2, 1, settings)

    measured = simulated(true, trace)
    rough = replace(true, decode=DecodeCost(0.002, 0.0005 / 3.0))
    found = tuned(rough, [(trace, measured)] * 2, simulated)
    assert found.decode.step_seconds(1) == pytest.approx(true.decode.step_seconds(1), rel=0.02)
    assert tuned(rough, [(trace, []), (trace, [])], simulated) is rough


def test_a_run_that_was_slow_throughout_has_a_pace_of_its_own() -> None:
    """All of it takes twice as long: what is usual is between, and no noise is made of it."""

    def slowed(outcomes: list[Outcome], pace: float) -> list[Outcome]:
        return [replace(o, ttft_s=(o.ttft_s or 0.0) * pace, e2e_s=o.e2e_s * pace) for o in outcomes]

    even = replica_model([run(1), run(2)], DecodeCost(0.001, 0.0))
    assert even.paces == pytest.approx((1.0, 1.0), abs=0.02)
    model = replica_model([run(1), slowed(run(2), 2.0)], DecodeCost(0.001, 0.0))
    assert model.paces == pytest.approx((0.5**0.5, 2.0**0.5), rel=0.05)
    assert model.prefill_error.mean == pytest.approx(even.prefill_error.mean, rel=0.1)
    for pace, factor in zip(model.paces, (1.0, 2.0), strict=True):
        then = model.at_pace(pace)
        assert then.decode.step_seconds(1) == pytest.approx(factor * STEP_S, rel=0.05)
        assert then.prefill.seconds(900, 64) == pytest.approx(
            factor * even.prefill.seconds(900, 64), rel=0.05
        )
        drawn = [then.step_time(1).seconds(prefill(700)) for _ in range(3)]
        assert min(drawn) > 0.8 * factor * TRUE.seconds(700)


def test_noise_is_drawn_from_prefills_of_about_that_length() -> None:
    samples = [Sample(0.01 + 1e-6 * k, 3.0) for k in range(ALIKE)]
    samples += [Sample(0.08 + 1e-6 * k, 1.5) for k in range(ALIKE)]
    steady = PRESETS["emufleet"]
    noisy = NoisyStepTime(steady, samples, random.Random(1))
    short, long = prefill(16), prefill(1_300)
    assert noisy.seconds(short) == pytest.approx(3.0 * steady.seconds(short))
    assert noisy.seconds(long) == pytest.approx(1.5 * steady.seconds(long))


def test_the_same_seed_draws_the_same() -> None:
    model = replica_model([run(1)], DecodeCost(0.001, 0.0))
    one, same, other = model.step_time(1), model.step_time(1), model.step_time(2)
    drawn = [[time.seconds(prefill(500)) for _ in range(20)] for time in (one, same, other)]
    assert drawn[0] == drawn[1] != drawn[2]
