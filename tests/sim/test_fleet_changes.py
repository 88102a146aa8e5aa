"""Replicas that differ, die, come back, join and are drained."""

from collections.abc import Sequence

import pytest

from sim.contender import contender
from sim.fleet_change import FleetChange
from sim.outcome import Outcome
from sim.simulate import SimulationSettings, run_once, simulate
from sim.simulated_replica import ReplicaSettings
from sim.workload.arrivals import plan_arrivals
from sim.workload.sources import open_trace
from tests.sim.traces import timed


def outcomes(
    settings: SimulationSettings, policy: str = "predicted_finish", rate: float = 1.5
) -> list[Outcome]:
    trace = open_trace("mooncake", requests=600)
    plan = plan_arrivals(trace, rate=rate, seed=1)
    return run_once(trace, plan, contender(policy), 4, 1, settings)


def sent_to(made: Sequence[Outcome], replica: int, from_s: float, to_s: float) -> int:
    return sum(o.replica == replica and from_s <= o.sent_s < to_s for o in made)


def test_a_slow_replica_gets_less_work_and_everybody_waits_longer() -> None:
    even = outcomes(SimulationSettings(), rate=1.0)
    slow = outcomes(SimulationSettings(unlike=((2, ReplicaSettings(slowdown=3.0)),)), rate=1.0)

    def work(made: Sequence[Outcome], replica: int) -> int:
        return sum(o.prompt_tokens - o.cached_tokens for o in made if o.replica == replica)

    assert work(slow, 2) < 0.7 * work(even, 2)
    assert sum(o.ttft_s or 0.0 for o in slow) > sum(o.ttft_s or 0.0 for o in even)


def test_a_replica_with_little_memory_hits_less() -> None:
    settings = SimulationSettings(unlike=((0, ReplicaSettings(capacity_tokens=100_000)),))

    def hits(settings: SimulationSettings) -> int:
        return sum(o.cached_tokens for o in outcomes(settings, "round_robin") if o.replica == 0)

    assert hits(settings) < 0.8 * hits(SimulationSettings())


def test_who_was_on_a_dead_replica_is_retried_or_told_and_nobody_is_sent_there() -> None:
    changes = (FleetChange(60.0, "fail", 1), FleetChange(120.0, "restart", 1))
    made = outcomes(SimulationSettings(changes=changes))
    assert len(made) == 600
    failed = [o for o in made if o.error == "replica failed"]
    assert failed and all(o.sent_s < 60.0 and o.ttft_s is not None for o in failed)  # cut in mid-stream
    assert sent_to(made, 1, 0.0, 50.0) > 20
    assert not [o for o in made if o.replica == 1 and o.error is None and 60.0 < o.sent_s < 120.0]
    assert sent_to(made, 1, 125.0, 1e9) > 20  # back, found by a probe
    after = [o for o in made if o.replica == 1 and o.sent_s + (o.ttft_s or 0.0) > 120.0]
    first = min(after, key=lambda o: o.sent_s + (o.ttft_s or 0.0))
    assert first.cached_tokens == 0  # with an empty cache


def test_requests_on_their_way_to_a_dead_replica_go_elsewhere() -> None:
    trace = timed([(100.0 * k, 1_000, 5, ()) for k in range(40)], block_tokens=2_048)
    settings = SimulationSettings(
        network_delay_s=0.05,
        changes=(FleetChange(1.02, "fail", 0),),
        warmup_share=0.0,
        report_interval_s=60.0,
    )
    made = run_once(trace, plan_arrivals(trace), contender("round_robin"), 2, 1, settings)
    assert [o for o in made if o.error] == []  # connect errors and closed connections are retried
    assert {o.replica for o in made if o.sent_s > 1.1} == {1}


def test_a_crash_and_an_instant_restart_lose_the_cache() -> None:
    def cached(changes: tuple[FleetChange, ...]) -> int:
        made = outcomes(SimulationSettings(changes=changes))
        return sum(o.cached_tokens for o in made if 60.0 < o.sent_s < 90.0)

    restarts = tuple(FleetChange(60.0, "restart", replica) for replica in range(4))
    assert cached(restarts) < 0.6 * cached(())


def test_all_replicas_dead_is_an_error_not_a_hang() -> None:
    changes = (FleetChange(30.0, "fail", 0), FleetChange(30.0, "fail", 1))
    trace = open_trace("mooncake", requests=150)
    settings = SimulationSettings(changes=changes, warmup_share=0.0)
    (result,) = simulate(trace, ["predicted_finish"], replicas=2, settings=settings)
    assert result.requests == 150 and 0 < result.errors < 150
    assert dict(result.error_kinds).keys() <= {"replica failed", "no replica"}


def test_a_replica_that_joins_takes_work_at_once_and_none_before() -> None:
    made = outcomes(SimulationSettings(changes=(FleetChange(60.0, "join", 3),)))
    assert sent_to(made, 3, 0.0, 60.0) == 0
    assert sent_to(made, 3, 60.0, 70.0) > 5


def test_a_drained_replica_finishes_what_it_has_and_gets_nothing_new() -> None:
    changes = (FleetChange(60.0, "drain", 0), FleetChange(100.0, "resume", 0))
    made = outcomes(SimulationSettings(changes=changes))
    assert not [o for o in made if o.error]
    held = 5.0  # a request held in the router when the drain began is sent elsewhere, later
    assert sent_to(made, 0, 60.0, 100.0 - held) == 0
    assert sent_to(made, 0, 100.0, 110.0) > 5


@pytest.mark.parametrize(
    "text", ["600:fail", "600:explode:3", "x:fail:3", "600:fail:-1", "1:fail:2:3", "inf:fail:1"]
)
def test_changes_that_make_no_sense(text: str) -> None:
    with pytest.raises(ValueError, match="expected SECONDS:KIND:REPLICA with KIND one of fail"):
        FleetChange.parse(text)


def test_changes_of_replicas_that_are_not_there() -> None:
    trace = open_trace("mooncake", requests=5)
    settings = SimulationSettings(changes=(FleetChange(1.0, "fail", 2),))
    with pytest.raises(ValueError, match="change of replica 2: there are 2, counted from 0"):
        simulate(trace, ["random"], replicas=2, settings=settings)


def test_replicas_join_in_any_order_and_only_once() -> None:
    changes = (FleetChange(40.0, "join", 3), FleetChange(60.0, "join", 1), FleetChange(60.0, "join", 0))
    made = outcomes(SimulationSettings(changes=changes))
    for change in changes:
        assert sent_to(made, change.replica, 0.0, change.at_s) == 0
        assert sent_to(made, change.replica, change.at_s, change.at_s + 10.0) > 3
    twice = SimulationSettings(changes=(*changes, FleetChange(80.0, "join", 1)))
    early = SimulationSettings(changes=(*changes, FleetChange(20.0, "drain", 3)))
    trace = open_trace("mooncake", requests=5)
    for settings, says in ((twice, "joins twice"), (early, "drain of replica 3 before it joins")):
        with pytest.raises(ValueError, match=says):
            simulate(trace, ["random"], replicas=4, settings=settings)
