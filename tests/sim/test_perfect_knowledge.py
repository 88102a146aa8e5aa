"""The bound that is told what no router is told."""

from dataclasses import replace

import pytest

from sim.contender import contender
from sim.perfect_knowledge import informed
from sim.simulate import make_fleets, simulate
from sim.simulation_settings import SimulationSettings
from sim.step_time.step_time import cold_prefill_s
from sim.workload.sources import open_trace

BASE = SimulationSettings()


def test_perfect_knowledge_prices_each_replica_right_before_it_has_done_anything() -> None:
    slow = replace(BASE.replica, slowdown=2.5)
    settings = informed(replace(BASE, unlike=((1, slow),)))
    (fleet,) = make_fleets(contender("perfect_knowledge"), 2, 512, 1, settings)
    for replica, slowdown in zip(fleet.replicas, (1.0, 2.5), strict=True):
        true_s = slowdown * cold_prefill_s(settings.step_time, 12_000, 8_192)
        assert replica.cost.prefill_s(12_000, 0) == pytest.approx(true_s, rel=0.05)
        assert replica.cost.step_s(20) == pytest.approx(slowdown * (0.008 + 20 * 60e-6), rel=0.05)


def test_perfect_knowledge_is_told_what_no_router_is() -> None:
    settings = informed(SimulationSettings(routers=3, report_lag_s=1.0))
    assert settings.kv_events is not None and settings.kv_events.delay_s == 0.0
    assert settings.tell_max_tokens and settings.peer_lag_s == 0.0 and settings.report_lag_s == 0.0


def test_it_answers_everything_and_comes_out_the_same_each_time() -> None:
    trace = open_trace("mooncake", requests=80)
    once, again = (simulate(trace, ["perfect_knowledge"], replicas=4, rate=2.0) for _ in range(2))
    assert once[0].errors == 0 and once == again
