"""KV that moves between simulated replicas: by hand for one request, and what it does to a trace."""

from dataclasses import replace

import pytest

from replica.batch import Batch, Work
from replica.sequence import Sequence
from sim.contender import CONTENDERS, contender
from sim.fleet_change import FleetChange
from sim.outcome import Outcome
from sim.results import Result
from sim.simulate import SimulationSettings, build, result_of, simulate
from sim.simulated_fleet import SimulatedFleet
from sim.simulated_replica import ReplicaSettings
from sim.step_time.linear import LinearStepTime
from sim.two_pools import KvMoves, Moved, PulledStepTime
from sim.workload.arrivals import plan_arrivals
from sim.workload.sources import open_trace
from sim.workload.trace import Trace
from tests.sim.traces import timed

STEP = LinearStepTime(step_s=0.01, decode_sequence_s=0.0, prefill_token_s=1e-4, attention_tokens=1e15)
BLOCK = 512
POOLS = KvMoves(2)


def run(
    trace: Trace,
    settings: SimulationSettings,
    *,
    replicas: int,
    rate: float = 1.0,
    policy: str = "predicted_finish",
) -> tuple[SimulatedFleet, list[Outcome], Result]:
    """A run to its end, after which nothing is booked anywhere."""
    plan = plan_arrivals(trace, rate=rate, seed=1, mean_think_s=1.0)
    simulated = build(trace, plan, contender(policy), replicas, 1, settings)
    simulated.queue.run()
    outcomes = [one for one in simulated.outcomes if one is not None]
    assert len(outcomes) == len(plan)
    for router in simulated._routers:
        assert all(one.in_flight == 0 and not one.held for one in router.fleet.replicas)
    for replica in range(len(simulated.row)):
        scheduler = simulated.row.scheduler(replica)
        scheduler.check_invariants()
        assert not scheduler.has_work and not scheduler.loads
        assert scheduler.cache.free_blocks == scheduler.cache.blocks
    return simulated, outcomes, result_of(policy, trace, plan, outcomes, replicas, settings)


def trace_of(*prompts: tuple[float, int, int]) -> Trace:
    """(seconds, prompt tokens, output tokens) of prompts that share nothing."""
    rows = []
    for number, (at_s, tokens, output_tokens) in enumerate(prompts):
        blocks = tuple(range(1_000 * number, 1_000 * number + tokens // BLOCK))
        rows.append((1e3 * at_s, tokens, output_tokens, blocks))
    return timed(rows, BLOCK)


def settings_of(moves: KvMoves | None, **more: object) -> SimulationSettings:
    return replace(SimulationSettings(step_time=STEP, kv_moves=moves, warmup_share=0.0), **more)  # type: ignore[arg-type]


def test_one_long_prompt_by_hand() -> None:
    """10 ms + 800 ms on the prefill replica, 26 + 34.4 ms on the way, 10.1 ms for the last token."""
    simulated, (outcome,), _ = run(trace_of((0.0, 8_000, 3)), settings_of(POOLS), replicas=1)
    assert simulated.handed_over == 1
    transfer_s = 0.026 + 4.3e-6 * 7_999
    assert outcome.ttft_s == pytest.approx(0.810 + transfer_s + 0.0101)
    assert outcome.e2e_s == pytest.approx(0.810 + transfer_s + 0.0101 + 2 * 0.01)
    assert (outcome.output_tokens, outcome.cached_tokens, outcome.replica) == (3, 0, 0)
    assert simulated.pulled_tokens == 7_999


def test_a_short_prompt_is_computed_where_it_is_answered() -> None:
    simulated, (outcome,), _ = run(trace_of((0.0, 200, 3)), settings_of(POOLS), replicas=1)
    assert simulated.handed_over == 0 and outcome.replica in (1, 2)
    assert outcome.ttft_s == pytest.approx(0.03)


def test_a_transfer_that_takes_longer_than_computing_is_not_made() -> None:
    far = KvMoves(2, transfer_s=5.0)
    simulated, (outcome,), _ = run(trace_of((0.0, 8_000, 3)), settings_of(far), replicas=1)
    assert simulated.handed_over == 0 and outcome.ttft_s == pytest.approx(0.81)


def test_others_decode_while_kv_is_on_its_way() -> None:
    slow = KvMoves(1, transfer_s=0.3)
    trace = trace_of((0.0, 100, 200), (0.1, 16_000, 2))
    simulated, (short, long), _ = run(trace, settings_of(slow), replicas=1)
    assert simulated.handed_over == 1 and long.ttft_s is not None and long.ttft_s > 1.6 + 0.3
    assert short.tpot_s == pytest.approx(0.01, rel=0.02), "no step of it waited"


def test_only_what_was_not_moved_is_computed() -> None:
    carried = Moved()
    carried.moved_tokens = 999
    sequence = Sequence.of_blocks("a", (1,), 1_000, 1, block_size=BLOCK, parameters=carried)
    step = PulledStepTime(STEP)
    last = Batch((Work(sequence, 512, 488, True),), 0, 0, 488)
    assert step.seconds(last) == pytest.approx(0.0101)
    chunk = Batch((Work(sequence, 512, 100, False),), 0, 0, 100)
    assert step.seconds(chunk) == pytest.approx(0.01)
    carried.moved_tokens = 0
    assert step.seconds(last) == STEP.seconds(last)


@pytest.mark.parametrize("capacity", [6_000, 9_000])
def test_where_the_pulled_kv_has_no_room_it_waits_or_is_computed(capacity: int) -> None:
    small = replace(ReplicaSettings(), capacity_tokens=capacity)
    prompts = [(0.05 * number, 2_000 + 500 * (number % 5), 40) for number in range(40)]
    simulated, outcomes, _ = run(trace_of(*prompts), settings_of(POOLS, replica=small), replicas=2)
    assert not any(one.error for one in outcomes) and simulated.handed_over > 5


def test_two_pools_decode_without_stalls() -> None:
    trace = open_trace("mooncake", requests=500)
    _, _, together = run(trace, SimulationSettings(), replicas=8, rate=2.0)
    simulated, _, apart = run(trace, SimulationSettings(kv_moves=POOLS), replicas=6, rate=2.0)
    assert apart.errors == 0 and simulated.handed_over > 200
    assert apart.tpot_ms.p99 and together.tpot_ms.p99 and apart.tpot_ms.p99 < 0.3 * together.tpot_ms.p99
    assert apart.e2e_s.mean and together.e2e_s.mean and apart.e2e_s.mean < 0.8 * together.e2e_s.mean


def test_prefixes_that_are_pulled_are_not_computed_again() -> None:
    trace = open_trace("mooncake", requests=500)
    _, _, computing = run(trace, SimulationSettings(), replicas=8, rate=2.0)
    simulated, _, pulling = run(trace, SimulationSettings(kv_moves=KvMoves()), replicas=8, rate=2.0)
    assert simulated.handed_over == 0 and simulated.pulled_tokens > 100_000
    assert pulling.cached_share and computing.cached_share
    assert pulling.cached_share > 1.03 * computing.cached_share
    assert (
        pulling.ttft_s.mean and computing.ttft_s.mean and pulling.ttft_s.mean < 1.05 * computing.ttft_s.mean
    )


@pytest.mark.parametrize(
    "changes",
    [
        ["8:fail:0"],
        ["8:fail:2", "12:restart:2"],
        ["8:drain:0", "9:drain:1"],
        ["8:restart:0", "9:restart:1", "10:restart:2", "11:restart:3"],
    ],
)
def test_replicas_of_either_pool_may_fail_and_come_back(changes: list[str]) -> None:
    trace = open_trace("mooncake", requests=150)
    settings = SimulationSettings(kv_moves=POOLS, changes=tuple(map(FleetChange.parse, changes)))
    simulated, outcomes, _ = run(trace, settings, replicas=2, rate=2.0)
    assert {one.error for one in outcomes} <= {None, "replica failed", "no replica"}
    assert simulated.handed_over > 0


@pytest.mark.parametrize("policy", sorted(set(CONTENDERS) - {"pooled_cache"}))
def test_every_policy_can_run_two_pools(policy: str) -> None:
    trace = open_trace("mooncake", requests=60)
    _, outcomes, _ = run(trace, SimulationSettings(kv_moves=POOLS), replicas=2, rate=2.0, policy=policy)
    assert not any(one.error for one in outcomes)


def test_several_routers_share_two_pools() -> None:
    trace = open_trace("mooncake", requests=200)
    settings = SimulationSettings(kv_moves=POOLS, routers=3, peer_lag_s=0.01)
    simulated, outcomes, _ = run(trace, settings, replicas=3, rate=1.5)
    assert simulated.handed_over > 50 and not any(one.error for one in outcomes)


def test_same_seed_same_figures() -> None:
    trace = open_trace("mooncake", requests=100)
    settings = SimulationSettings(kv_moves=POOLS)
    first, second = (
        simulate(trace, ["predicted_finish"], replicas=2, settings=settings)[0].json_object()
        for _ in range(2)
    )
    assert first == second


def test_one_cache_for_all_has_no_pools() -> None:
    with pytest.raises(ValueError, match="pooled_cache has one cache for all"):
        simulate(
            open_trace("mooncake", requests=5), ["pooled_cache"], settings=SimulationSettings(kv_moves=POOLS)
        )
