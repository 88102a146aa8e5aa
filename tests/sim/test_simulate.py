"""Whole simulations: the same bytes from the same seed, and policies in a sensible order."""

import os
import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from router.routing.policies import POLICIES
from router.routing.prompt_blocks import text_prompt
from sim.contender import contender
from sim.results import Result
from sim.simulate import SimulationSettings, build, simulate
from sim.simulated_replica import ReplicaSettings
from sim.workload.arrivals import plan_arrivals
from sim.workload.chat_mix import ChatMix, chat_trace
from sim.workload.sources import open_trace
from tests.sim import golden_run
from tests.sim.traces import timed


def test_the_golden_run() -> None:
    assert golden_run.golden_run() == golden_run.GOLDEN_FILE.read_bytes(), (
        "simulated results changed; if that is meant, run: python -m tests.sim.golden_run"
    )


def test_same_seed_same_bytes_in_processes_that_hash_differently() -> None:
    root = Path(__file__).parents[2]
    command = [
        sys.executable,
        "-m",
        "warmroute",
        "simulate",
        "--trace",
        "chats",
        "--requests",
        "300",
        "--json",
    ]
    command += ["--seed", "11", "--replicas", "3", "--rate", "3"]
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
    assert outputs[0] == outputs[1] and outputs[0].startswith(b"[")


def test_another_seed_gives_other_times() -> None:
    trace = open_trace("mooncake", requests=200)
    one, other = (simulate(trace, ["round_robin"], replicas=4, seed=seed)[0] for seed in (1, 2))
    assert one != other and one.requests == pytest.approx(other.requests, abs=20)


@pytest.fixture(scope="module")
def on_the_slice() -> dict[str, Result]:
    kinds = ["round_robin", "least_loaded", "power_of_two", "prefix_affinity", "predicted_finish"]
    results = simulate(open_trace("mooncake"), kinds, replicas=8, rate=2.0, seed=1)
    return {result.policy: result for result in results}


def test_policies_that_know_prefixes_win(on_the_slice: dict[str, Result]) -> None:
    def figures(policy: str) -> tuple[float, float, float, float]:
        result = on_the_slice[policy]
        assert result.ttft_s.mean and result.e2e_s.mean and result.cached_share and result.in_slo_share
        return result.ttft_s.mean, result.e2e_s.mean, result.cached_share, result.in_slo_share

    ttft, e2e, cached, in_slo = figures("predicted_finish")
    for policy in ("round_robin", "least_loaded", "power_of_two"):
        other_ttft, other_e2e, other_cached, other_in_slo = figures(policy)
        assert ttft < 0.7 * other_ttft, policy
        assert e2e < 0.7 * other_e2e, policy
        assert cached > 1.8 * other_cached, policy
        assert in_slo > other_in_slo + 0.2, policy
    assert e2e < figures("prefix_affinity")[1]


def test_holding_shortens_the_wait_and_loses_nobody(on_the_slice: dict[str, Result]) -> None:
    (at_once,) = simulate(
        open_trace("mooncake"),
        ["predicted_finish"],
        replicas=8,
        rate=2.0,
        seed=1,
        settings=SimulationSettings(hold=False),
    )
    held = on_the_slice["predicted_finish"]
    assert held.requests == at_once.requests and held.errors == 0
    assert held.ttft_s.mean is not None and at_once.ttft_s.mean is not None
    assert held.ttft_s.mean < at_once.ttft_s.mean


def test_nobody_beats_the_ideal_cache_and_knowing_policies_come_near(on_the_slice: dict[str, Result]) -> None:
    for result in on_the_slice.values():
        assert result.cached_share is not None and result.ideal_cached_share is not None
        assert result.cached_share <= result.ideal_cached_share
        assert result.errors == 0 and result.max_over_mean_work is not None
        assert 1.0 <= result.max_over_mean_work < 1.5
    best = on_the_slice["predicted_finish"]
    assert best.cached_share and best.ideal_cached_share
    assert best.cached_share > 0.85 * best.ideal_cached_share
    assert best.spills > 0 and on_the_slice["round_robin"].spills == 0


def test_every_policy_finishes_every_request() -> None:
    trace = open_trace("chats", requests=150)
    settings = SimulationSettings(warmup_share=0.0)
    for result in simulate(trace, sorted(POLICIES), replicas=3, rate=5.0, settings=settings):
        assert (result.requests, result.errors) == (150, 0), result.policy


def test_one_replica_with_room_has_the_ideal_share() -> None:
    """A closed loop of one chat at a time leaves nothing to timing: the cache is the ideal one."""
    trace = chat_trace(ChatMix(chats=20, apps=3), seed=3)
    settings = SimulationSettings(warmup_share=0.0)
    (result,) = simulate(trace, ["round_robin"], replicas=1, rate=0.01, settings=settings)
    assert result.cached_share == pytest.approx(result.ideal_cached_share)
    assert result.cached_share is not None and result.cached_share > 0.5


def test_a_small_cache_forgets() -> None:
    trace = open_trace("mooncake", requests=500)
    shares = []
    for capacity in (150_000, 600_000, 6_000_000):
        settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=capacity))
        (result,) = simulate(trace, ["predicted_finish"], replicas=4, rate=0.7, settings=settings)
        shares.append(result.cached_share or 0.0)
    assert all(less < more for less, more in pairwise(shares))


def test_turns_wait_for_the_answer_and_the_pause() -> None:
    trace = chat_trace(ChatMix(chats=30), seed=8)
    (fast,) = simulate(trace, ["least_loaded"], replicas=4, rate=1e6)
    pauses_s = max(
        sum(
            (request.think_ms or 0.0) / 1e3 for request in trace.requests if request.session == f"chat {chat}"
        )
        for chat in range(30)
    )
    assert fast.wall_s > pauses_s  # however fast sessions start, thinking takes its time


def test_the_network_adds_its_delay_both_ways() -> None:
    trace = timed([(10_000.0 * k, 1_000, 10, ()) for k in range(20)], block_tokens=2_048)
    near = SimulationSettings()
    far = replace(near, network_delay_s=0.25)
    (one,), (other,) = (simulate(trace, ["round_robin"], replicas=2, settings=s) for s in (near, far))
    assert one.ttft_s.mean is not None and one.e2e_s.mean is not None
    assert other.ttft_s.mean == pytest.approx(one.ttft_s.mean + 0.5)
    assert other.e2e_s.mean == pytest.approx(one.e2e_s.mean + 0.5)


def test_a_router_that_reads_text_learns_how_many_tokens_it_is() -> None:
    """As a real one does: what it believes of caches and of costs is in tokens, and it sees bytes."""
    trace = timed([(1e3 * second, 200, 1, (second,)) for second in range(60)], block_tokens=128)
    body = {"model": "m", "messages": [{"role": "user", "content": "a" * 1_600}]}
    settings = SimulationSettings(read_prompt=lambda request: text_prompt(body))
    plan = plan_arrivals(trace, rate=1.0, seed=1)
    simulated = build(trace, plan, contender("predicted_finish"), 2, 1, settings)
    fleet = simulated._routers[0].fleet
    assert fleet.token_ratio.tokens_per_unit == 0.25
    simulated.queue.run()
    assert fleet.token_ratio.tokens_per_unit == pytest.approx(200 / 1_600, rel=0.1)


def test_prompts_that_never_fit_are_errors() -> None:
    trace = timed([(0.0, 900, 5, (1,)), (1.0, 300_000, 5, tuple(range(10, 595))), (2.0, 900, 5, (1,))])
    settings = SimulationSettings(warmup_share=0.0)
    (result,) = simulate(trace, ["predicted_finish"], replicas=2, settings=settings)
    assert (result.requests, result.errors) == (3, 1)
    assert result.error_kinds == (("too long for the replica", 1),)


def test_progress_reaches_the_end() -> None:
    seen: list[tuple[str, int, int]] = []
    trace = open_trace("mooncake", requests=50)
    simulate(trace, ["random", "round_robin"], replicas=2, progress=lambda *step: seen.append(step))
    assert ("random", 50, 50) in seen and seen[-1] == ("round_robin", 50, 50)


@pytest.mark.parametrize(
    ("policies", "replicas", "rate", "message"),
    [
        (["best"], 2, 1.0, "policy 'best' is unknown; expected one of"),
        ([], 2, 1.0, "no policy given"),
        (["random"], 0, 1.0, "replicas is 0"),
        (["random"], 2, 0.0, "rate is 0.0"),
    ],
)
def test_arguments_that_make_no_sense(policies: list[str], replicas: int, rate: float, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        simulate(open_trace("mooncake", requests=5), policies, replicas=replicas, rate=rate)


def test_the_radix_tree_with_pages_of_a_block_is_the_block_cache() -> None:
    """Both forget the least recently used tails first."""
    trace = open_trace("mooncake", requests=400)
    results = []
    for cache in ("blocks", "radix"):
        replica = ReplicaSettings(capacity_tokens=300_000, cache=cache)
        (result,) = simulate(trace, ["predicted_finish"], replicas=4, settings=SimulationSettings(replica))
        results.append(result)
    assert results[0] == results[1] and results[0].cached_share


def test_other_evictions_are_other_results() -> None:
    trace = open_trace("chats", requests=400)
    shares = set()
    for eviction in ("lru", "slru", "lfu", "tlru"):
        replica = ReplicaSettings(capacity_tokens=30_000, cache="radix", eviction=eviction)
        (result,) = simulate(trace, ["predicted_finish"], replicas=4, settings=SimulationSettings(replica))
        assert result.errors == 0
        shares.add(result.cached_share)
    assert len(shares) == 4
