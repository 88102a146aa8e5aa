"""An error that a limit made says which limit, how much it is, and what key sets it."""

import json
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from tests.fakes.fake_replica import STREAM_HEAD, Hang, Send, chunk, delta
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawAnswer, RawClient

LONG = {**CHAT_STREAM, "messages": [{"role": "user", "content": "hello " * 5_000}]}
Ask = Callable[[Rig], Awaitable[RawAnswer]]


async def hanging(rig: Rig) -> RawAnswer:
    rig.replica.default = [Hang()]
    return await rig.ask(CHAT)


async def stalling(rig: Rig) -> RawAnswer:
    rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
    answer = await rig.ask(CHAT_STREAM)
    assert not answer.whole
    return answer


async def sending(rig: Rig, data: bytes) -> RawAnswer:
    client = await rig.client()
    await client.send(data)
    return await client.answer()


async def too_long_a_body(rig: Rig) -> RawAnswer:
    return await rig.ask(b"x" * 1_001)


async def too_long_a_chunked_body(rig: Rig) -> RawAnswer:
    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n"
    return await sending(rig, head + b"3e9\r\n" + b"x" * 1_001)


async def too_long_a_head(rig: Rig) -> RawAnswer:
    return await sending(rig, b"GET /v1/x HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 2_048)


async def half_a_request(rig: Rig) -> RawAnswer:
    return await sending(rig, b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")


async def no_connection(rig: Rig) -> RawAnswer:
    with socket.socket() as blocked:
        blocked.bind(("127.0.0.1", 0))
        blocked.listen(0)
        fillers = [socket.socket() for _ in range(3)]  # fill the backlog: the next SYN is not answered
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(blocked.getsockname())
        rig.plane.service.pool(rig.fleet.replicas[0]).port = blocked.getsockname()[1]
        try:
            return await rig.ask(CHAT)
        finally:
            for filler in fillers:
                filler.close()


async def one_connection_more(rig: Rig) -> RawAnswer:
    for _ in range(2):
        client = await rig.client()
        await client.post(CHAT)
        await client.answer()
    return await (await rig.client()).answer()


async def held(rig: Rig) -> RawAnswer:
    rig.replica.default = [Hang()]
    clients: list[RawClient] = []
    for count in range(1, 3):
        clients.append(await rig.client())
        await clients[-1].post(LONG)
        await until(lambda count=count: rig.replica.answering + rig.fleet.held == count)  # type: ignore[misc]
    if rig.config.hold.max_requests == 1:
        return await rig.ask(LONG)
    return await clients[1].answer()


HOLDING = {"policy": {"kind": "predicted_finish"}}


@pytest.mark.parametrize(
    ("ask", "keys", "status", "says"),
    [
        (too_long_a_body, {"limits": {"body_bytes": 1_000}}, 413, "1000 bytes (limits.body_bytes)"),
        (too_long_a_chunked_body, {"limits": {"body_bytes": 1_000}}, 413, "1000 bytes (limits.body_bytes)"),
        (too_long_a_head, {"limits": {"header_bytes": 2_048}}, 431, "2048 bytes (limits.header_bytes)"),
        (half_a_request, {"timeouts": {"client_header_s": 0.1}}, 408, "0.1 s (timeouts.client_header_s)"),
        (no_connection, {"timeouts": {"connect_s": 0.1}}, 504, "0.1 s (timeouts.connect_s)"),
        (hanging, {"timeouts": {"first_byte_s": 0.1}}, 504, "0.1 s (timeouts.first_byte_s)"),
        (stalling, {"timeouts": {"idle_s": 0.1}}, 200, "0.1 s (timeouts.idle_s)"),
        (hanging, {"timeouts": {"total_s": 0.1}}, 504, "0.1 s (timeouts.total_s)"),
        (stalling, {"timeouts": {"total_s": 0.1}}, 200, "0.1 s (timeouts.total_s)"),
        (one_connection_more, {"limits": {"client_connections": 2}}, 503, "2 connections already (limits.cl"),
        (held, HOLDING | {"hold": {"max_wait_s": 0.1}}, 429, "0.1 s (hold.max_wait_s)"),
        (held, HOLDING | {"hold": {"max_requests": 1}}, 429, "1 requests wait already (hold.max_requests)"),
    ],
)
def test_which_limit_how_much_and_what_key(ask: Ask, keys: dict[str, Any], status: int, says: str) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await ask(rig)
        assert answer.status == status
        if status == 200:  # too late for a status: an event in the stream
            event = json.loads(answer.body.split(b"data: ")[-1])
            assert says in event["error"]["message"]
        else:
            assert says in answer.error["message"]
            assert (answer.error["type"] == "rate_limit_error") is (status == 429)

    with_rig(scenario, **keys)
