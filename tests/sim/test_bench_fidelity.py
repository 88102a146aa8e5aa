"""``warmroute bench fidelity``: the simulator beside our router over HTTP."""

import asyncio
import json
from dataclasses import replace

import pytest

import warmroute
from sim.bench.as_sent import bodies_of, reader
from sim.bench.exact_trace import exact_trace
from sim.bench.http_fidelity import usual_plan
from sim.bench.side_by_side import Figure, Pair, meaning_of_marks, reversed_pairs, verdict_on_order
from sim.contender import contender
from sim.replay import ReplaySettings, replay
from sim.results import Result, Slo, Spread, summarize
from sim.simulate import run_once
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from sim.workload.arrivals import plan_arrivals
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
    few = replace(real, policies=("round_robin", "predicted_finish"))
    assert few.all_requests == 4 * 40 + 5 * 24  # each policy twice, measured runs around them
    tokens = [
        sum(request.prompt_tokens for request in plan.trace(plan.requests, 1).requests)
        for plan in (tiny, real)
    ]
    assert tokens[1] < tokens[0] / 10
