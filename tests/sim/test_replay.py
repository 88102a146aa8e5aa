"""Replay against a server on a real socket: timing, loops, faults, figures."""

import asyncio
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import warmroute
from sim.outcome import Outcome
from sim.replay import Replay, ReplaySettings, estimate_cold_prefill_us, replay
from sim.workload.chat_mix import ChatMix, chat_trace
from sim.workload.prompt_text import PromptText
from sim.workload.sources import open_trace
from sim.workload.text_sessions import TextSessions, read_text_sessions
from sim.workload.trace import Trace
from tests.sim.commands import exit_code
from tests.sim.fake_openai import FakeOpenAI
from tests.sim.traces import timed


def run(server: FakeOpenAI, trace: Trace, *, text: TextSessions | None = None, **changes: Any) -> Replay:
    async def main() -> Replay:
        async with server.running() as url:
            settings = ReplaySettings(url=url, model="fake-model", salt="s", warmup_share=0.0)
            return await asyncio.wait_for(replay(trace, replace(settings, **changes), text=text), 60)

    return asyncio.run(main())


def short(requests: int, gap_ms: float = 1.0, output_tokens: int = 5) -> Trace:
    return timed([(gap_ms * k, 700, output_tokens, (k % 3,)) for k in range(requests)])


def test_figures_come_from_usage_and_the_first_content() -> None:
    server = FakeOpenAI()
    server.content_after_s = 0.2  # after an event that only names the role
    server.routing_headers = lambda number: {
        "x-warmroute-replica": f"r{number % 2}",
        "x-warmroute-reason": "spill" if number == 3 else "warm",
    }
    done = run(server, short(8), label="mine").result
    assert (done.policy, done.requests, done.errors, done.spills) == ("mine", 8, 0, 1)
    assert done.ttft_s.mean is not None and done.ttft_s.mean >= 0.2
    assert done.cached_share == 0.5  # what the server says, not what was counted
    assert done.ideal_cached_share == pytest.approx(5 * 512 / (8 * 700))
    assert done.max_over_mean_work == 1.0
    assert done.send_lag_p99_s is not None and done.send_lag_p99_s >= 0.0
    tokens = [body["max_tokens"] for body in server.received]
    assert tokens == [5] * 8  # three events each: TPOT is over four tokens
    assert done.tpot_ms.mean is not None and done.e2e_s.mean is not None
    assert done.tpot_ms.mean == pytest.approx((done.e2e_s.mean - done.ttft_s.mean) / 4 * 1e3)


def test_bodies_are_deterministic_streamed_and_share_what_the_trace_shares() -> None:
    first, again, salted = FakeOpenAI(), FakeOpenAI(), FakeOpenAI()
    run(first, short(6))
    run(again, short(6))
    run(salted, short(6), salt="t", ignore_eos=True, max_output_tokens=2)
    bodies = sorted(json.dumps(body) for body in first.received)
    assert bodies == sorted(json.dumps(body) for body in again.received)
    prompts = sorted(body["messages"][0]["content"] for body in first.received)
    assert {len(prompt) for prompt in prompts} == {2800}
    assert len({prompt[:2048] for prompt in prompts}) == 3 and len(set(prompts)) == 6
    for body in first.received:
        assert body["stream"] is True and body["stream_options"] == {"include_usage": True}
        assert body["model"] == "fake-model" and "ignore_eos" not in body
    others = {body["messages"][0]["content"][:2048] for body in salted.received}
    assert not others & {prompt[:2048] for prompt in prompts}
    assert all(body["ignore_eos"] is True and body["max_tokens"] == 2 for body in salted.received)


def test_timed_traces_are_open_loop() -> None:
    """The server answers nobody before all twenty are there: a closed loop would never get that far."""
    server = FakeOpenAI()
    server.hold_until_in_flight = 20
    done = run(server, short(20, gap_ms=5.0))
    assert done.result.errors == 0 and server.most_in_flight == 20


def test_requests_come_at_their_times() -> None:
    server = FakeOpenAI()
    trace = timed([(0.0, 10, 1, ()), (600.0, 10, 1, ()), (800.0, 10, 1, ())])
    done = run(server, trace, speed=2.0)
    came = [at - server.came_s[0] for at in server.came_s]
    lag_s = done.result.send_lag_p99_s
    assert lag_s is not None
    assert came[1] >= 0.3 - lag_s - 0.05 and came[2] >= 0.4 - lag_s - 0.05


def test_sessions_are_closed_loop() -> None:
    server = FakeOpenAI()
    server.content_after_s = 0.02
    trace = chat_trace(ChatMix(chats=6, system_tokens=200, output_tokens=4, mean_think_s=0.01), seed=2)
    done = run(server, trace, speed=200.0)
    assert (done.result.requests, done.result.errors) == (len(trace.requests), 0)
    words = PromptText(trace.block_tokens, salt="s")
    numbers = {body["messages"][0]["content"]: number for number, body in enumerate(server.received)}
    sent = [
        numbers[words.prompt(request.block_ids, request.prompt_tokens, str(position))]
        for position, request in enumerate(trace.requests)
    ]
    followed = 0
    for (before, earlier), (after, later) in pairwise(zip(trace.requests, sent, strict=True)):
        if before.session == after.session:
            assert server.came_s[later] >= server.answered_s[earlier]
            followed += 1
    assert followed == len(trace.requests) - 6 > 5


def test_recorded_conversations_are_sent_with_their_words(tmp_path: Path) -> None:
    path = tmp_path / "text.json"
    turns = [
        ("system", "be kind"),
        ("user", "one"),
        ("assistant", "two"),
        ("user", "three"),
        ("assistant", "four"),
    ]
    path.write_text(json.dumps([{"traj": [{"role": role, "content": said} for role, said in turns]}] * 2))
    text = read_text_sessions(path)
    server = FakeOpenAI()
    done = run(server, text.trace, text=text, speed=1000.0)
    assert done.result.errors == 0 and len(server.received) == 4
    longest = max(server.received, key=lambda body: len(body["messages"]))["messages"]
    assert [message["content"] for message in longest] == ["[run s]\nbe kind", "one", "two", "three"]


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("status", "status 503"),
        ("truncated", "truncated: the stream ended without [DONE]"),
        ("broken", "truncated: the transfer broke"),
        ("error event", "error event in the stream"),
        ("garbage", "garbage: an event that is no JSON object"),
    ],
)
def test_what_is_no_whole_answer_is_an_error(fault: str, error: str) -> None:
    server = FakeOpenAI()
    server.fault = lambda number, body: fault if number in (2, 5) else None
    done = run(server, short(8)).result
    assert (done.requests, done.errors) == (8, 2)
    assert done.error_kinds == ((error, 2),)
    assert done.ttft_s.mean is not None and done.in_slo_share is not None and done.in_slo_share <= 0.75


def test_a_silent_server_times_out() -> None:
    server = FakeOpenAI()
    server.hold_until_in_flight = 3  # only two come
    done = run(server, short(2), silence_limit_s=0.3).result
    assert done.error_kinds == (("timed out", 2),)


def test_answers_without_usage_have_no_tpot() -> None:
    server = FakeOpenAI()
    server.tells_usage = False
    done = run(server, short(3))
    assert done.without_usage == 3 and done.result.tpot_ms.mean is None
    assert done.result.cached_share == 0.0 and done.result.errors == 0


def test_cold_prefill_is_taken_from_cold_prompts_that_did_not_wait() -> None:
    waits = [0.0, 0.0, 0.4, 0.9, 2.0, 3.0, 0.7, 0.1, 5.0, 0.2]
    cold = [Outcome(0.0, 2_000, 5, 0, 2_000 * 30e-6 + wait, 1.0) for wait in waits]
    warm = [Outcome(0.0, 2_000, 5, 1_900, 0.004, 1.0)] * 10
    brief = [Outcome(0.0, 10, 5, 0, 0.003, 1.0)] * 10
    assert estimate_cold_prefill_us([*warm, *cold, *brief]) == pytest.approx(30.0)
    assert estimate_cold_prefill_us([]) == 0.0


def command(server: FakeOpenAI, *arguments: str) -> int:
    async def main() -> int:
        async with server.running() as url:
            return await asyncio.to_thread(warmroute.main, ["replay", "--url", url, *arguments])

    return asyncio.run(main())


def test_the_command_prints_one_json_object(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeOpenAI()
    arguments = [
        "--requests",
        "20",
        "--speed",
        "1000",
        "--max-prompt-tokens",
        "400",
        "--json",
        "--warmup",
        "0",
    ]
    assert command(server, *arguments) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["policy"], row["requests"], row["errors"]) == ("replay", 20, 0)
    assert {"ttft_s", "e2e_s", "tpot_ms", "in_slo_share", "wall_s", "send_lag_p99_s"} <= set(row)
    lengths = [len(body["messages"][0]["content"]) for body in server.received]
    longest = max(request.prompt_tokens for request in open_trace("mooncake", requests=20).requests)
    assert max(lengths) == pytest.approx(1600, abs=longest // 512 * 2)
    assert {body["model"] for body in server.received} == {"fake-model"}


def test_the_command_sends_the_routers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAY_TEST_KEY", "sk-replay")
    server = FakeOpenAI()
    assert command(server, "--requests", "3", "--speed", "1000", "--api-key-env", "REPLAY_TEST_KEY") == 0
    assert server.keys == {"Bearer sk-replay"}


def test_the_command_prints_a_table_with_its_errors(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeOpenAI()
    server.fault = lambda number, body: "status" if number == 1 else None
    assert command(server, "--requests", "9", "--speed", "1000", "--model", "m", "--warmup", "0") == 0
    shown = capsys.readouterr().out
    assert "1 x status 503" in shown and "9 requests to http://127.0.0.1:" in shown


def test_the_command_fails_when_nothing_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    server = FakeOpenAI()
    server.fault = lambda number, body: "status"
    assert command(server, "--requests", "3", "--speed", "1000", "--warmup", "0") == 1
    assert "no request succeeded: status 503 (3)" in capsys.readouterr().err


def test_wrong_addresses_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(["replay", "--url", "localhost:1"]) == 2
    assert "--url: localhost:1: expected http://HOST:PORT" in capsys.readouterr().err
    assert warmroute.main(["replay", "--url", "http://127.0.0.1:1"]) == 1
    said = capsys.readouterr().err
    assert "http://127.0.0.1:1/v1/models cannot be reached: Connection refused; does a server run" in said
    unnamed = ["replay", "--url", "http://127.0.0.1:1", "--model", "m", "--requests", "2", "--speed", "1000"]
    assert warmroute.main(unnamed) == 1
    assert "connection failed: Connection refused" in capsys.readouterr().err
    assert warmroute.main(["replay", "--url", "http://127.0.0.1:1", "--trace", "nowhere"]) == 2
    assert "no file 'nowhere'" in capsys.readouterr().err
