"""``warmroute bench routing``: a trace over HTTP, before replicas with the simulator's time and cache."""

import asyncio
import json
import sys
from pathlib import Path

import aiohttp
import pytest

import warmroute
from sim.bench import routers
from sim.bench.emulated_replicas import BLOCK_TOKENS, CHARACTERS_PER_TOKEN, block_ids
from sim.demo.processes import ChildProcesses, free_ports
from sim.event_queue import EventQueue

BLOCK_CHARACTERS = BLOCK_TOKENS * CHARACTERS_PER_TOKEN


@pytest.fixture
def no_rivals(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(routers, "SBIN", "")


def test_a_trace_is_routed_and_told_in_the_replicas_time(
    no_rivals: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--requests", "30", "--replicas", "2", "--speed", "100", "--rate", "5"]
    assert warmroute.main(["bench", "routing", *arguments, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    (result,) = told["results"]
    assert result["policy"] == "warmroute" and result["errors"] == 0
    # The trace's first 30 prompts have some 10,000 tokens each: a second of prefill, whatever the wall says.
    assert result["ttft_s"]["mean"] > 0.3
    assert result["wall_s"] > 5.0
    assert result["max_over_mean_work"] >= 1.0, "where its requests went is told"
    assert {one["router"] for one in told["not_measured"]} == {name for name, _, _ in routers.RIVALS}


def test_only_what_is_there_can_be_asked_for(no_rivals: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert warmroute.main(["bench", "routing", "--only", "envoy"]) == 2
    assert "--only envoy" in capsys.readouterr().err
    assert warmroute.main(["bench", "routing", "--trace", "no-such-trace"]) == 2


def test_an_emulated_replica_caches_prefixes_and_speaks_openai(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    prompt = "word " * (3 * BLOCK_CHARACTERS // 5 + 100)

    async def scenario() -> None:
        with ChildProcesses(tmp_path) as children:
            command = [sys.executable, "-m", "sim.bench.emulated_replicas", "100", str(port)]
            await children.wait_ready(children.start("replica", command), url + "/health", 20.0)
            async with aiohttp.ClientSession(url) as session:

                async def ask(**more: object) -> tuple[int, str]:
                    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 3, **more}
                    async with session.post("/v1/chat/completions", json=body) as answer:
                        return answer.status, await answer.text()

                cold = json.loads((await ask())[1])["usage"]
                assert cold["prompt_tokens_details"]["cached_tokens"] == 0
                assert cold["prompt_tokens"] == len(prompt) // 4 and cold["completion_tokens"] == 3
                status, stream = await ask(stream=True)
                assert status == 200 and stream.endswith("data: [DONE]\n\n")
                assert f'"cached_tokens":{3 * BLOCK_TOKENS}' in stream
                assert (await ask(messages="nothing"))[0] == 400
                assert (await ask(messages=[{"role": "user", "content": "a " * 500_000}]))[0] == 400
                async with session.get("/metrics") as answer:
                    assert f'block_size="{BLOCK_TOKENS}"' in await answer.text()
                async with session.post("/tokenize", json={"prompt": prompt}) as answer:
                    assert (await answer.json())["count"] > 0

    asyncio.run(scenario())


def test_blocks_are_named_with_all_before_them() -> None:
    one = "a" * BLOCK_CHARACTERS + "b" * BLOCK_CHARACTERS
    other = "c" * BLOCK_CHARACTERS + "b" * BLOCK_CHARACTERS
    assert block_ids(one, 2)[0] == block_ids("a" * BLOCK_CHARACTERS, 1)[0]
    assert block_ids(one, 2)[1] != block_ids(other, 2)[1]


def test_the_queue_stops_at_a_time() -> None:
    queue, seen = EventQueue(), []
    for time_s in (1.0, 2.0, 3.0):
        queue.at(time_s, seen.append, time_s)
    queue.run(2.0)
    assert (seen, queue.now, queue.next_at) == ([1.0, 2.0], 2.0, 3.0)
    queue.run(2.5)
    assert (len(seen), queue.now) == (2, 2.5)
    queue.run()
    assert (len(seen), queue.now, queue.next_at) == (3, 3.0, None)
