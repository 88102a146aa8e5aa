"""The request log: a row per answered request, no text unless asked for, rotated, never in anybody's way."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import orjson
import pytest

from router.config import RequestLogConfig, parse_config
from router.config_errors import ConfigError
from router.proxy.assembly import Router
from router.proxy.counters import Counters
from router.proxy.request_head import RequestHead
from router.proxy.request_log import RequestLog
from router.routing.in_flight import Usage
from router.routing.prompt_blocks import read_prompt
from tests.fakes.fake_replica import FakeReplica, SeenRequest, Send, completion, sized
from tests.fakes.proxy_rig import CHAT_STREAM, until
from tests.fakes.router_process import router_process
from tests.fakes.router_rig import RouterRig, with_router
from tests.sim.diagnose_logs import chats
from warmroute import main

SECRET = "the customer's secret"
LONG = {"model": "m", "messages": [{"role": "user", "content": f"{SECRET} " * 60}]}


HEAD = RequestHead(b"POST", b"/v1/chat/completions", False, {}, [])


def rows(path: Path) -> list[dict[str, Any]]:
    return [orjson.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []


def test_rows_name_prompts_by_keys_alone(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def scenario(rig: RouterRig) -> None:
        assert (await rig.ask(CHAT_STREAM)).status == 200
        assert (await rig.ask(LONG)).status == 200
        assert (await rig.ask(b"not json")).status == 200, "the replica judges it; it has no prompt to tell"
        await until(lambda: len(rows(path)) == 2)
        streamed, long = rows(path)
        assert streamed["replica"] == "r0" and streamed["policy"] == "round_robin"
        assert (streamed["prompt_tokens"], streamed["cached_tokens"], streamed["output_tokens"]) == (10, 4, 2)
        assert streamed["ttft_ms"] > 0 and "ttft_ms" not in long
        prompt = read_prompt(orjson.dumps(LONG))
        assert long["block_keys"] == list(prompt.keys) and long["text_bytes"] == prompt.units
        assert SECRET not in path.read_text()
        assert os.stat(path).st_mode & 0o077 == 0, "nobody but the router's user reads it"

    with_router(scenario, log={"requests": {"file": str(path)}})


def test_the_policy_of_a_row_is_the_one_that_chose(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def scenario(rig: RouterRig) -> None:
        for asked in ({}, {"x_warmroute_policy": "session"}, {"x_warmroute_policy": "random"}):
            assert (await rig.ask(LONG, **asked)).status == 200
        await rig.reload(rig.entry(0), policy={"kind": "least_loaded"})
        assert (await rig.ask(LONG, x_warmroute_policy="session")).status == 200
        await until(lambda: len(rows(path)) == 4)
        told = [row["policy"] for row in rows(path)]
        assert told == ["round_robin", "session", "round_robin", "least_loaded"]

    policy = {"kind": "round_robin", "selectable": ["session"]}
    with_router(scenario, policy=policy, log={"requests": {"file": str(path)}})


def test_bodies_are_written_if_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def scenario(rig: RouterRig) -> None:
        await rig.ask(json.dumps(LONG, indent=2).encode())
        await until(lambda: len(rows(path)) == 1)
        assert rows(path)[0]["body"] == LONG

    with_router(scenario, log={"requests": {"file": str(path), "prompts": "bodies"}})


def test_who_asked_is_told_by_headers(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"

    async def scenario(rig: RouterRig) -> None:
        await rig.ask(LONG, x_app_name="support", x_session_id="c42")
        await rig.ask(LONG)
        await until(lambda: len(rows(path)) == 2)
        named, nameless = rows(path)
        assert (named["app"], named["session"]) == ("support", "c42")
        assert "app" not in nameless and "session" not in nameless

    with_router(scenario, log={"requests": {"file": str(path), "app_header": "X-App-Name"}})


def test_a_reload_switches_it_on_to_another_file_and_off(tmp_path: Path) -> None:
    one, other = tmp_path / "one.jsonl", tmp_path / "other.jsonl"

    async def scenario(rig: RouterRig) -> None:
        await rig.ask()
        await rig.reload(rig.entry(0), log={"requests": {"file": str(one)}})
        await rig.ask()
        log = rig.router.data_plane.service.request_log
        await rig.reload(rig.entry(0), log={"requests": {"file": str(one)}}, expose_routing=True)
        assert rig.router.data_plane.service.request_log is log, "the same stays open"
        await rig.reload(rig.entry(0), log={"requests": {"file": str(other)}})
        await rig.ask()
        await rig.reload(rig.entry(0))
        await rig.ask()
        await until(lambda: (len(rows(one)), len(rows(other))) == (1, 1))
        refused = await rig.try_reload(rig.entry(0), log={"requests": {"file": "/no/such/folder/log"}})
        assert refused.status == 400 and b"log.requests.file" in refused.body

    with_router(scenario)


def test_a_file_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Path) -> None:
    config = parse_config(
        {"replicas": [{"url": "http://a:1"}], "log": {"requests": {"file": str(tmp_path / "no" / "log")}}},
        "test",
    )
    with pytest.raises(ConfigError, match=r"log.requests.file: .* cannot be written"):
        Router(config)


def test_files_are_rotated_and_the_oldest_go(tmp_path: Path) -> None:
    path = tmp_path / "log"
    prompt = read_prompt(orjson.dumps(LONG))
    for number in range(6):
        config = RequestLogConfig(file=str(path), rotate_mib=1e-6, keep=2)
        log = RequestLog(config, Counters())  # a row each: whatever is there is full
        log.answered(HEAD, b"", prompt, f"r{number}", 0, Usage(10, 1, 5), None)
        log.close()
    assert [rows(tmp_path / name)[0]["replica"] for name in ("log", "log.1", "log.2")] == ["r5", "r4", "r3"]
    assert sorted(file.name for file in tmp_path.iterdir()) == ["log", "log.1", "log.2"]


def test_what_waits_is_written_at_the_end_of_a_process_and_diagnosed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "requests.jsonl"
    bodies = chats(requests=30, conversations=3)

    def answer(request: SeenRequest) -> list[Send]:
        tokens = len(request.body) // 4
        return [Send(sized(completion(prompt=tokens, cached=tokens // 2)))]

    async def scenario() -> None:
        replica = FakeReplica(default=answer)
        await replica.start()
        try:
            async with router_process(tmp_path, [replica], log={"requests": {"file": str(path)}}) as router:
                for body in bodies:
                    assert (await router.ask(body)).status == 200
                router.process.terminate()
                assert await router.exit_code() == 0
        finally:
            await replica.stop()

    asyncio.run(scenario())
    assert len(rows(path)) == 30
    assert main(["diagnose", str(path), "--json", "--warmup", "0"]) == 0
    made = orjson.loads(capsys.readouterr().out)
    assert made["replicas"] == 1 and made["counted"] == 30
    assert made["cached_share"]["measured"] == pytest.approx(0.5, abs=0.02)
    assert 0.5 < made["cached_share"]["ideal"] < 1.0
    assert made["prompt_tokens"] - made["cached_tokens"] == sum(made["lost_tokens"].values())
