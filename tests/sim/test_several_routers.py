"""Routers side by side: what private and shared ledgers cost, KV events on their way."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sim.contender import CONTENDERS
from sim.kv_event_feed import KvEventSettings
from sim.results import Result
from sim.simulate import SimulationSettings, simulate
from sim.workload.sources import open_trace

ALONE = SimulationSettings(hold=False)


def run(settings: SimulationSettings, *, rate: float = 2.0, replicas: int = 8) -> Result:
    return simulate(
        open_trace("mooncake"), ["predicted_finish"], replicas=replicas, rate=rate, settings=settings
    )[0]


def ttft(result: Result) -> float:
    assert result.ttft_s.mean is not None and result.errors == 0
    return result.ttft_s.mean


@pytest.fixture(scope="module")
def one_router() -> Result:
    return run(ALONE)


def test_ledgers_shared_without_lag_are_as_good_as_one(one_router: Result) -> None:
    assert ttft(run(replace(ALONE, routers=4, peer_lag_s=0.0))) < 1.06 * ttft(one_router)


def test_routers_that_share_hold_together() -> None:
    """One queue for all, a few milliseconds late: far better than sending at once, nearly as one router."""
    one, four = (
        run(SimulationSettings(routers=routers, peer_lag_s=lag_s), rate=2.5)
        for routers, lag_s in ((1, None), (4, 0.006))
    )
    assert ttft(four) < 1.12 * ttft(one) and ttft(four) < 0.9 * ttft(run(ALONE, rate=2.5))


def test_the_older_the_news_the_worse(one_router: Result) -> None:
    fresh, old = (ttft(run(replace(ALONE, routers=8, peer_lag_s=lag_s))) for lag_s in (0.25, 5.0))
    assert ttft(one_router) < fresh < 1.5 * ttft(one_router)
    assert old > 1.5 * fresh


def test_private_ledgers_are_worse_than_shared_ones() -> None:
    private, shared = run(replace(ALONE, routers=4)), run(replace(ALONE, routers=4, peer_lag_s=0.25))
    assert ttft(private) > 1.3 * ttft(shared)
    assert private.cached_share and shared.cached_share and private.cached_share < shared.cached_share


def test_one_router_does_not_care_how_old_metrics_are() -> None:
    """Its own reservations tell it all."""
    results = [run(replace(ALONE, report_lag_s=lag_s)) for lag_s in (0.0, 1.9)]
    assert ttft(results[0]) == pytest.approx(ttft(results[1]), rel=0.01)


def test_kv_events_are_as_good_as_the_mirror_where_that_has_the_right_size() -> None:
    settings = SimulationSettings()
    mirror, events = run(settings), run(replace(settings, kv_events=KvEventSettings()))
    assert ttft(events) == pytest.approx(ttft(mirror), rel=0.05)


def test_lost_events_are_replayed_or_guessed() -> None:
    """Never worse than without any events."""
    settings = SimulationSettings()
    mirror = run(settings)
    whole = run(replace(settings, kv_events=KvEventSettings()))
    replayed = run(replace(settings, kv_events=KvEventSettings(loss_share=0.05)))
    lost = run(replace(settings, kv_events=KvEventSettings(loss_share=0.05, replayed=False)))
    assert ttft(replayed) == pytest.approx(ttft(whole), rel=0.05)
    assert lost.cached_share and mirror.cached_share and lost.cached_share > 0.97 * mirror.cached_share
    assert ttft(lost) < 1.05 * ttft(mirror)


def test_the_longest_answers_known_are_no_reason_to_fail() -> None:
    told = run(SimulationSettings(tell_max_tokens=True))
    assert told.errors == 0 and ttft(told) < 1.2 * ttft(run(SimulationSettings()))


def test_same_seed_same_bytes_with_everything_switched_on() -> None:
    """In processes whose sets and dicts of objects are ordered differently."""
    root = Path(__file__).parents[2]
    policies = ",".join(sorted(set(CONTENDERS) - {"pooled_cache"}))
    command = [sys.executable, "-m", "warmroute", "simulate", "--requests", "80", "--json", "--seed", "3"]
    command += ["--policy", policies, "--replicas", "3", "--routers", "2", "--peer-lag", "0.1"]
    command += ["--kv-events", "0.05", "--kv-loss", "0.1", "--change", "4:restart:1", "--arrivals", "gamma:2"]
    outputs = [
        subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)},
            capture_output=True,
            check=True,
            timeout=100,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] and outputs[0].count(b'"policy"') == len(CONTENDERS) - 1
