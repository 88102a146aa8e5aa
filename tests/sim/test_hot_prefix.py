"""A prefix suddenly takes 60% of the traffic: never worse than round robin, spread within two seconds."""

from collections import defaultdict
from statistics import mean

import pytest

from sim.contender import contender
from sim.outcome import Outcome
from sim.simulate import SimulationSettings, run_once
from sim.workload.arrivals import plan_arrivals
from sim.workload.hot_prefix import HotPrefix, hot_prefix_trace

RATE = 6.0
ONSET_S = HotPrefix().hot_from_s / RATE
WINDOW_S = 2.0


def outcomes(policy: str) -> tuple[list[Outcome], list[bool]]:
    """By request: what became of it, and whether it began with the popular prefix."""
    trace = hot_prefix_trace(requests=2_200)
    plan = plan_arrivals(trace, rate=RATE, seed=1, mean_think_s=1.0)
    beginnings = [request.block_ids[0] for request in trace.requests]
    popular = max(set(beginnings), key=beginnings.count)
    made = run_once(trace, plan, contender(policy), 8, 1, SimulationSettings())
    return made, [beginning == popular for beginning in beginnings]


@pytest.fixture(scope="module")
def ours() -> tuple[list[Outcome], list[bool]]:
    return outcomes("predicted_finish")


def ttft_by_window(made: list[Outcome]) -> dict[int, float]:
    windows = defaultdict(list)
    for outcome in made:
        assert outcome.ttft_s is not None
        windows[int(outcome.sent_s / WINDOW_S)].append(outcome.ttft_s)
    return {window: mean(times) for window, times in windows.items()}


def test_K16_never_worse_than_round_robin_in_any_window(ours: tuple[list[Outcome], list[bool]]) -> None:
    round_robin = ttft_by_window(outcomes("round_robin")[0])
    for window, ttft_s in ttft_by_window(ours[0]).items():
        assert ttft_s <= round_robin[window], f"seconds {window * WINDOW_S} on"


def test_spread_within_two_seconds(ours: tuple[list[Outcome], list[bool]]) -> None:
    homes = {
        outcome.replica
        for outcome, popular in zip(*ours, strict=True)
        if popular and outcome.sent_s < ONSET_S + 2.0
    }
    assert len(homes) >= 4, "54 requests a second of 40 ms each need three replicas and some room"
    late = [o.ttft_s for o, popular in zip(*ours, strict=True) if popular and o.sent_s > ONSET_S + 4.0]
    assert mean(time for time in late if time is not None) < 0.2
