"""What ends early: clients that leave, requests that fail, engines that die, replicas that stop."""

import asyncio
import json
import logging
import os
import signal
import socket
import sys
from pathlib import Path

import aiohttp
import pytest

from replica.config import ConfigError, ReplicaConfig
from replica.engine import Engine
from replica.request import Request
from replica.server.app import ListenError, start
from tests.replica.serving import USER, WAIT_S, faulty_engine, gauge, get, post, replica, stream, until

LONG = {"prompt": "Hello", "max_tokens": 3000, "temperature": 0, "ignore_eos": True}


@pytest.mark.parametrize("streaming", [True, False])
def test_B052_a_client_that_leaves_frees_its_sequence(
    streaming: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        async with replica() as running:
            body = json.dumps(LONG | {"stream": streaming}).encode()
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
            reader, writer = await asyncio.open_connection(running.host, running.port)
            writer.write(head.encode() + body)

            async def works() -> bool:
                return await gauge(running.url, "vllm:num_requests_running") == 1.0

            async def idle() -> bool:
                return await gauge(running.url, "vllm:num_requests_running") == 0.0

            await until(works)
            if streaming:
                await reader.readuntil(b"data: ")
            writer.transport.abort()
            await until(idle)
            assert await gauge(running.url, "vllm:kv_cache_usage_perc") == 0.0
            _, page = await get(running.url + "/metrics")
            ended = 'vllm:request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0'
            assert ended in page
            assert await gauge(running.url, "vllm:generation_tokens_total") < 3000
            assert (await post(running.url + "/v1/completions", LONG | {"max_tokens": 2}))[0] == 200

    asyncio.run(run())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


def test_B052_a_client_that_leaves_while_it_waits_is_forgotten() -> None:
    async def run() -> None:
        async with replica(max_running=1, max_batched_tokens=16) as running:
            url = running.url + "/v1/completions"
            first = asyncio.create_task(post(url, LONG | {"max_tokens": 400}))
            second = asyncio.create_task(post(url, LONG))

            async def one_waits() -> bool:
                return await gauge(running.url, "vllm:num_requests_waiting") == 1.0

            async def none_waits() -> bool:
                return await gauge(running.url, "vllm:num_requests_waiting") == 0.0

            await until(one_waits)
            second.cancel()
            await until(none_waits)
            assert (await first)[1]["usage"]["completion_tokens"] == 400

    asyncio.run(run())


def test_B052_many_departures_at_once_change_nobody_elses_answer() -> None:
    """While they wait, in prefill and in decode, of one and of two choices, streamed or not."""

    async def run() -> None:
        async with replica(max_running=8) as running:
            url = running.url + "/v1/completions"
            kept = LONG | {"max_tokens": 60}
            expected = (await post(url, kept))[1]["choices"][0]["text"]
            staying = asyncio.create_task(post(url, kept))
            leaving = [
                asyncio.create_task(
                    post(url, LONG | {"prompt": f"Go {turn}", "n": 1 + turn % 2, "stream": turn % 3 == 0})
                )
                for turn in range(40)
            ]

            async def busy() -> bool:
                return await gauge(running.url, "vllm:num_requests_running") == 8.0

            async def idle() -> bool:
                names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
                return [await gauge(running.url, name) for name in names] == [0.0, 0.0, 0.0]

            await until(busy)
            for task in leaving:
                task.cancel()
            assert (await staying)[1]["choices"][0]["text"] == expected
            await until(idle)

    asyncio.run(run())


def test_a_request_that_fails_is_a_500_and_others_go_on() -> None:
    breaks = faulty_engine(lambda row: 263 in row.sequence.token_ids)

    async def run() -> None:
        async with replica(breaks) as running:
            url = running.url + "/v1/completions"
            good = asyncio.create_task(post(url, LONG | {"max_tokens": 60}))
            status, answer = await post(url, LONG | {"prompt": [1, 263, 2]})
            assert status == 500
            assert answer["error"]["type"] == "InternalServerError"
            assert "injected failure" in answer["error"]["message"]
            status, answer = await post(url, LONG | {"prompt": [1, 263, 2], "stream": True})
            assert status == 500, "nothing was sent yet, so a stream fails as plainly"
            assert (await good)[1]["usage"]["completion_tokens"] == 60
            assert (await get(running.url + "/health"))[0] == 200

    asyncio.run(run())


def test_a_request_that_cannot_begin_is_a_500_and_leaves_nothing() -> None:
    class Poisoned(Engine):
        def add(self, request: Request) -> None:
            super().add(request)
            if 263 in request.prompt:
                raise RuntimeError("injected failure")

    async def run() -> None:
        async with replica(Poisoned) as running:
            url = running.url + "/v1/completions"
            good = asyncio.create_task(post(url, LONG | {"max_tokens": 60}))
            for _ in range(2):
                status, answer = await post(url, LONG | {"prompt": [1, 263, 2]})
                assert status == 500 and "injected failure" in answer["error"]["message"]
            assert (await good)[1]["usage"]["completion_tokens"] == 60
            assert await gauge(running.url, "vllm:num_requests_waiting") == 0.0
            assert await gauge(running.url, "vllm:kv_cache_usage_perc") == 0.0
            assert (await get(running.url + "/health"))[0] == 200

    asyncio.run(run())


def test_a_stream_that_fails_says_so_and_breaks_off() -> None:
    async def run() -> None:
        async with (
            replica(faulty_engine(lambda row: row.start >= 20)) as running,
            aiohttp.ClientSession() as session,
        ):
            raw = b""
            with pytest.raises(aiohttp.ClientPayloadError):
                async with session.post(
                    running.url + "/v1/completions", json=LONG | {"stream": True}
                ) as answer:
                    assert answer.status == 200
                    async for piece in answer.content.iter_any():
                        raw += piece
            last = json.loads(raw.decode().strip().split("data: ")[-1])
            assert "injected failure" in last["error"]["message"] and b"[DONE]" not in raw

    asyncio.run(run())


def test_when_the_engine_dies_health_fails_and_nobody_waits_for_ever() -> None:
    breaks = faulty_engine(lambda row: row.sequence.prompt_tokens == 7, fatal=True)

    async def run() -> None:
        async with replica(breaks, max_running=3, max_batched_tokens=16) as running:
            url = running.url + "/v1/completions"
            streaming = asyncio.create_task(post(url, LONG | {"stream": True}))
            waiting = [asyncio.create_task(post(url, LONG)) for _ in range(4)]

            async def two_wait() -> bool:
                return await gauge(running.url, "vllm:num_requests_waiting") == 2.0

            await until(two_wait)
            streaming.cancel()  # its slot goes to the deadly request, which is more urgent than those waiting
            deadly = post(url, LONG | {"prompt": [1] * 7, "priority": -1})
            async with asyncio.timeout(WAIT_S):
                for status, answer in await asyncio.gather(deadly, *waiting):
                    assert status == 500 and "injected death" in answer["error"]["message"]
            status, text = await get(running.url + "/health")
            assert status == 503 and "the engine died" in json.loads(text)["error"]["message"]
            status, answer = await post(url, LONG)
            assert status == 500 and "the engine died" in answer["error"]["message"]
            assert (await post(running.url + "/reset_prefix_cache", b""))[0] == 500
            assert (await get(running.url + "/metrics"))[0] == 200

    asyncio.run(run())


def test_an_engine_that_only_fails_gives_up() -> None:
    async def run() -> None:
        async with replica(faulty_engine(lambda row: True)) as running:
            url = running.url + "/v1/completions"
            for _ in range(3):
                status, answer = await post(url, LONG)
                assert status == 500 and "injected failure" in answer["error"]["message"]

            async def unhealthy() -> bool:
                return (await get(running.url + "/health"))[0] == 503

            await until(unhealthy)

    asyncio.run(run())


def test_a_stopped_replica_ends_what_runs() -> None:
    async def run() -> None:
        async with replica() as running:
            task = asyncio.create_task(stream(running.url + "/v1/completions", LONG))

            async def works() -> bool:
                return await gauge(running.url, "vllm:num_requests_running") == 1.0

            await until(works)
        async with asyncio.timeout(WAIT_S):
            with pytest.raises((aiohttp.ClientError, AssertionError)):
                await task

    asyncio.run(run())


def test_start_says_what_is_wrong() -> None:
    async def run() -> None:
        with pytest.raises(ConfigError, match="no such file or folder"):
            await start(ReplicaConfig(model="/nowhere"))
        with pytest.raises(ConfigError, match="max_model_len 9000 is more than the model's context of 8192"):
            await start(ReplicaConfig(model="tiny", max_model_len=9000))
        with pytest.raises(ConfigError, match="raise kv_tokens"):
            await start(ReplicaConfig(model="tiny", max_model_len=500, kv_tokens=256))
        with socket.create_server(("127.0.0.1", 0)) as taken:
            address = f"127.0.0.1:{taken.getsockname()[1]}"
            with pytest.raises(ListenError, match=address):
                await start(ReplicaConfig(model="tiny", listen=address))

    asyncio.run(run())


def test_the_command_serves_finishes_what_runs_and_stops_with_0(tmp_path: Path) -> None:
    async def run() -> None:
        config = tmp_path / "replica.yaml"
        config.write_text("model: tiny\nlisten: 127.0.0.1:0\nthreads: 1\nkv_tokens: 4096\n")
        child = await asyncio.create_subprocess_exec(
            sys.executable,
            "-c",
            "import sys; from warmroute import main; sys.exit(main())",
            "replica",
            str(config),
            stderr=asyncio.subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert child.stderr is not None
        try:
            async with asyncio.timeout(60):
                line = (await child.stderr.readline()).decode()
                assert "serving tiny at http://127.0.0.1:" in line
                url = "http://127.0.0.1:" + line.split("127.0.0.1:")[1].split(":")[0]
                body = {"messages": USER, "max_tokens": 300, "ignore_eos": True}
                task = asyncio.create_task(post(url + "/v1/chat/completions", body))

                async def works() -> bool:
                    return await gauge(url, "vllm:num_requests_running") == 1.0

                await until(works)
                child.send_signal(signal.SIGTERM)
                status, answer = await task
                assert status == 200 and answer["usage"]["completion_tokens"] == 300
                rest = (await child.stderr.read()).decode()
                assert await child.wait() == 0
                assert "stopped" in rest and "Traceback" not in rest
        finally:
            if child.returncode is None:
                child.kill()
                await child.wait()

    asyncio.run(run())
