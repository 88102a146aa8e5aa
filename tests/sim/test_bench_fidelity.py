"""``warmroute bench fidelity``: the simulator beside our router over HTTP."""

import asyncio
import json
import random
import re
from dataclasses import replace
from pathlib import Path

import pytest

import warmroute
from sim.bench.as_sent import bodies_of, reader
from sim.bench.exact_trace import exact_trace
from sim.bench.followed import followed
from sim.bench.http_fidelity import usual_plan
from sim.bench.other_work import cpu_times, others_share
from sim.bench.process_cpu import TICKS_PER_S
from sim.bench.same_decisions import same_decisions
from sim.bench.side_by_side import (
    Figure,
    Pair,
    meaning_of_marks,
    reversed_pairs,
    verdict_on_order,
    verdicts,
)
from sim.contender import contender
from sim.outcome import Outcome
from sim.replay import ReplaySettings, replay
from sim.results import Result, Slo, Spread, summarize
from sim.simulate import run_once
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from sim.step_time.noisy import NoisyStepTime, Sample
from sim.step_time.presets import PRESETS
from sim.workload.arrivals import plan_arrivals
from sim.workload.hot_prefix import HotPrefix, hot_prefix_trace
from sim.workload.trace import Trace, TraceRequest
from tests.sim.fake_openai import FakeOpenAI
from tests.sim.traces import timed


def pair(policy: str, live_ms: float, simulated_ms: float) -> Pair:
    def result(ttft_ms: float) -> Result:
        made = summarize(
            policy, (), replicas=1, slo=Slo(), cold_prefill_s=float, warmup_share=0.0, ideal=None
        )
        return replace(made, ttft_s=Spread(None, ttft_ms / 1e3, None, None), cached_share=0.5)

    return Pair((result(live_ms),), ((result(simulated_ms - 10.0), result(simulated_ms + 10.0)),))


def test_the_simulator_agrees_with_our_router_over_http(capsys: pytest.CaptureFixture[str]) -> None:
    """All real but the model: cached share, and which policy is better."""
    arguments = ["--requests", "300", "--speed", "8"]
    policies = ["--policy", "round_robin,prefix_affinity"]
    assert warmroute.main(["bench", "fidelity", *arguments, *policies, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (blind,), (affine,) = told["live"]
    assert blind["errors"] == affine["errors"] == 0
    assert max(map(abs, told["cached_share_off"])) < 0.02
    assert affine["cached_share"] > blind["cached_share"] + 0.02
    simulated = [rounds[0][0] for rounds in told["simulated"]]
    assert simulated[1]["cached_share"] > simulated[0]["cached_share"] + 0.02
    assert simulated[1]["ttft_s"]["mean"] < simulated[0]["ttft_s"]["mean"]
    assert affine["ttft_s"]["mean"] < blind["ttft_s"]["mean"]


def test_real_replicas_of_the_tiny_model(capsys: pytest.CaptureFixture[str]) -> None:
    """Measured, replayed, simulated with their own tokens; times mean nothing beside other tests.

    On a busy machine a turn may come before the one it follows is cached: a request or two of twenty.
    """
    pytest.importorskip("torch", reason="the extra [replica] is not installed")
    arguments = ["--model", "tiny", "--requests", "20", "--policy", "round_robin", "--load", "0.8"]
    arguments += ["--rounds", "1"]  # measured runs before and after it
    prompts = ["--apps", "6", "--system-tokens", "300", "--kv-tokens", "2048"]
    assert warmroute.main(["bench", "fidelity", *arguments, *prompts]) == 0
    shown = capsys.readouterr().out
    assert "1 x 20 requests," in shown and "2 replicas of tiny" in shown and "prefill_us_per_token" in shown
    (row,) = [line for line in shown.splitlines() if line.lstrip().startswith("round_robin")]
    live, _, simulated = row.split()[1:4]
    assert 0.0 < float(live) < 1.0 and float(simulated) == pytest.approx(float(live), abs=0.15)
    (alike,) = re.findall(r" (\d+)% ", row)
    assert int(alike) > 50  # both send in turn; two that come at once may change places
    assert row.split()[-1] == "0"


def test_a_model_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["bench", "fidelity", "--model", "no-such-model"]) == 1
    assert "warmroute bench fidelity: replica-" in capsys.readouterr().err


def test_orders_that_differ_by_little_are_not_held_against_anyone() -> None:
    near = [pair("a", 100.0, 120.0), pair("b", 108.0, 110.0)]
    assert reversed_pairs(near) == [] and "the same" in verdict_on_order(near)
    far = [pair("a", 100.0, 120.0), pair("b", 150.0, 110.0)]
    assert reversed_pairs(far) == [("a", "b")] and "NOT the same: a and b" in verdict_on_order(far)
    assert near[0].ttft.off == pytest.approx(0.2) and near[0].cached.mean == near[0].cached.live_mean == 0.5
    assert near[0].ttft.chance == pytest.approx(0.010 * 3.0**0.5) and near[0].cached.chance == 0.0


def test_marks_tell_a_promise_kept_from_one_that_chance_may_have_broken() -> None:
    """Off by 2 points: too much where simulations agree, as expected where they differ by as much."""
    assert Figure((0.50,), ((0.52, 0.52, 0.52),)).mark(0.01) == "!"
    assert Figure((0.50,), ((0.50, 0.52, 0.54),)).mark(0.01) == "~"
    assert Figure((0.50,), ((0.508, 0.508),)).mark(0.01) == ""
    wide = (0.50, 0.52, 0.54)
    assert Figure((0.50,) * 9, (wide,) * 9).mark(0.01) == "!"  # nine rounds in a row are no chance
    assert Figure((0.49, 0.55), (wide, wide)).mark(0.01) == ""  # means are compared


def test_the_verdict_tells_what_chance_may_do() -> None:
    kept, by_chance, broken = pair("a", 100.0, 105.0), pair("b", 50.0, 62.0), pair("c", 100.0, 200.0)
    _, told = verdicts([kept])
    assert told == "TTFT p50 within 10%: under every policy"
    _, told = verdicts([kept, by_chance])
    assert "no further off than chance explains under b (24%; chance does up to 69%)" in told
    _, told = verdicts([kept, by_chance, broken])
    assert told.startswith("TTFT p50 within 10%: NOT under c (100%; chance does up to 35%), b (24%")
    same = replace(kept, followed=(replace(kept.live[0], cached_share=0.52),))
    own = "cached share of the live router's own choices within 1 point or one request: "
    assert verdicts([same])[-1] == own + "NOT under a"
    assert same.followed_off == pytest.approx(0.02) and same.followed_mark == "!"
    few = replace(same, live=(replace(same.live[0], requests=40),))
    assert few.followed_mark == "" and verdicts([few])[-1] == own + "under every policy"


def test_with_the_live_choices_the_cached_share_is_no_chance() -> None:
    """Steps take other times, so this policy chooses otherwise; the same choices find the same cached."""
    mix = HotPrefix(apps=24, system_tokens=1_000, hot_share=0.0, user_tokens=120, output_tokens=12, per_s=4.0)
    trace = hot_prefix_trace(mix, requests=300, seed=1)
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=16_384), warmup_share=0.0)
    plan = plan_arrivals(trace)

    def steps(seed: int) -> SimulationSettings:
        noise = [Sample(0.01 * (1 + k), 0.5 + k % 3) for k in range(9)]
        return replace(settings, step_time=NoisyStepTime(PRESETS["emufleet"], noise, random.Random(seed)))

    def run(seed: int) -> list[Outcome]:
        return run_once(trace, plan, contender("prefix_affinity"), 2, 1, steps(seed))

    live, other = run(1), run(2)
    share = sum(one.cached_tokens for one in live) / sum(one.prompt_tokens for one in live)
    assert [one.replica for one in live] != [one.replica for one in other]
    made = followed(trace, live, 2, steps(2), 1)
    assert made is not None and made.cached_share == pytest.approx(share, abs=0.005)
    unknown = [*live[:-1], replace(live[-1], replica=None)]
    assert followed(trace, unknown, 2, steps(2), 1) is None


def test_told_the_same_a_router_decides_the_same() -> None:
    """Its own run, told again: all alike, whatever the other replica's name; a stranger's choices are not."""
    mix = HotPrefix(
        apps=24, system_tokens=1_000, hot_share=0.0, user_tokens=120, output_tokens=12, per_s=12.0
    )
    trace = hot_prefix_trace(mix, requests=200, seed=1)
    bodies = bodies_of(trace, ReplaySettings(url="", model="m", salt="s"))
    settings = SimulationSettings(
        replica=ReplicaSettings(capacity_tokens=16_384), read_prompt=reader(trace, bodies), hold=False
    )
    live = run_once(trace, plan_arrivals(trace), contender("predicted_finish"), 2, 1, settings)
    alike = same_decisions(trace, live, [0, 1], "predicted_finish", settings, 1)
    assert alike is not None and alike > 0.97
    renamed = [replace(one, replica=1 - (one.replica or 0)) for one in live]
    assert same_decisions(trace, renamed, [1, 0], "predicted_finish", settings, 1) == alike
    others = run_once(trace, plan_arrivals(trace), contender("round_robin"), 2, 1, settings)
    parted = same_decisions(trace, others, [0, 1], "predicted_finish", settings, 1)
    assert parted is not None and parted < 0.9
    failed = [replace(live[0], error="status 500"), *live[1:]]
    assert same_decisions(trace, failed, [0, 1], "predicted_finish", settings, 1) is None


def test_what_other_programs_took_is_told(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 0 50 800 50 0 0 0 70 0\ncpu0 1 2 3\n")
    before = cpu_times(stat)
    if before is None:
        pytest.skip("this system has no /proc")
    assert (before.all_s, before.idle_s) == (1_000 / TICKS_PER_S, 850 / TICKS_PER_S)
    after = replace(before, all_s=before.all_s + 10.0, idle_s=before.idle_s + 5.0, own_s=before.own_s + 2.0)
    assert others_share(before, after) == pytest.approx(0.3)
    assert others_share(before, before) is None and others_share(None, after) is None


def test_who_sends_too_few_requests_is_told() -> None:
    sure, unsure = pair("sure", 1_000.0, 1_000.0), pair("unsure", 50.0, 50.0)
    assert "--rounds" not in meaning_of_marks([sure])
    assert "\nchance may do more than is promised under unsure:" in meaning_of_marks([sure, unsure])


def test_a_trace_in_its_own_tokens() -> None:
    asked = [TraceRequest(64, 3, (1,), timestamp_ms=0.0), TraceRequest(64, 3, (1,), timestamp_ms=5.0)]
    made = exact_trace(Trace("t", 64, tuple(asked)), [[1, 2, 3, 4, 5], [1, 2, 9, 4]], 2)
    first, second = (one.block_ids for one in made.requests)
    assert first[0] == second[0] and len({*first, *second}) == 3
    assert [one.prompt_tokens for one in made.requests] == [5, 4]
    assert made.block_tokens == 2 and made.requests[1].timestamp_ms == 5.0


def test_replies_take_room_in_a_simulated_cache_as_they_do_in_a_real_one() -> None:
    """Two blocks of prompt and one that the reply fills: two other prompts drive out the first."""
    prompts = [[1, 2, 3, 4, 9], [5, 6, 7, 8, 9], [3, 3, 3, 3, 9], [1, 2, 3, 4, 5]]
    asked = tuple(TraceRequest(64, 3, (1,), timestamp_ms=1e3 * second) for second in range(4))
    made = exact_trace(Trace("t", 64, asked), prompts, 2)
    # Its last token is not computed.
    assert [len(one.output_block_ids) for one in made.requests] == [1, 1, 1, 1]
    names = {name for one in made.requests for name in one.block_ids + one.output_block_ids}
    assert len(names) == 10
    nameless = replace(made, requests=tuple(replace(one, output_block_ids=()) for one in made.requests))
    settings = SimulationSettings(replica=ReplicaSettings(capacity_tokens=14))
    cached = [
        run_once(trace, plan_arrivals(trace), contender("round_robin"), 1, 1, settings)[-1].cached_tokens
        for trace in (made, nameless)
    ]
    assert cached == [0, 2]


def test_a_simulated_router_reads_what_a_real_one_gets() -> None:
    """Streamed, with the length wanted, and the same words."""
    trace = timed([(1.0 * k, 700, 5 + k, (k % 3,)) for k in range(6)])
    server = FakeOpenAI()

    async def sent() -> ReplaySettings:
        async with server.running() as url:
            settings = ReplaySettings(url=url, model="fake-model", salt="s", ignore_eos=True)
            await asyncio.wait_for(replay(trace, settings), 60)
            return settings

    bodies = bodies_of(trace, asyncio.run(sent()))
    received = sorted(server.received, key=lambda body: body["max_tokens"])
    assert list(bodies) == received
    read = reader(trace, bodies)
    prompts = [read(request) for request in trace.requests]
    assert all(prompt.stream for prompt in prompts)
    assert [prompt.max_tokens for prompt in prompts] == [5, 6, 7, 8, 9, 10]
    assert prompts[0].keys[:2] == prompts[3].keys[:2] != prompts[1].keys[:2]


def test_models_that_take_a_second_a_prompt_get_fewer_and_shorter_ones() -> None:
    tiny, real = usual_plan("tiny"), usual_plan("smollm2")
    assert (tiny.model, real.model) == ("tiny", "smollm2")
    assert real.all_requests == 4 * 120 + 5 * 30  # two policies twice, measured runs around them
    tokens = [
        sum(request.prompt_tokens for request in plan.trace(plan.requests, 1).requests)
        for plan in (tiny, real)
    ]
    assert tokens[1] < tokens[0] / 6
