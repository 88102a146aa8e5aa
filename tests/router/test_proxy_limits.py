"""Time limits, each by its name; slow clients and slow replicas; back-pressure; shutdown."""

import asyncio
import json
import resource
import socket
from typing import Any

import pytest

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawClient


def test_B038_first_byte_timeout() -> None:
    async def scenario(rig: Rig) -> None:
        plans: list[list[Any]] = [[Hang()], [Send(b"HTTP/1.1 200"), Hang()]]
        for plan in plans:
            rig.replica.default = plan
            answer = await rig.ask(CHAT_STREAM)
            assert answer.status == 504
            assert answer.error["code"] == "first_byte_timeout"
            assert "first_byte_s" in answer.error["message"]
            await until(lambda: rig.replica.answering == 0)
        assert len(rig.replica.requests) == 2  # what the replica did with it is unknown: not sent again
        assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT

    with_rig(scenario, replicas=1, timeouts={"first_byte_s": 0.15})


def test_B038_idle_timeout_in_a_stream() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
        answer = await rig.ask(CHAT_STREAM)
        assert answer.status == 200
        assert not answer.whole
        assert answer.body.startswith(delta("a") + b'data: {"error"')
        assert b'"code":"idle_timeout"' in answer.body
        await until(lambda: rig.replica.aborted == 1)
        assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT

    with_rig(scenario, timeouts={"idle_s": 0.15})


def test_B038_idle_timeout_after_the_headers_and_in_a_json_body() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD), Hang()]
        assert b'"code":"idle_timeout"' in (await rig.ask({"input": "x"})).body
        rig.replica.default = [
            Send(head(content_length="99", content_type="application/json") + b"{"),
            Hang(),
        ]
        answer = await rig.ask(CHAT)
        assert (answer.whole, answer.body) == (False, b"{")

    with_rig(scenario, timeouts={"idle_s": 0.15})


@pytest.mark.parametrize("sent", [b"", chunk(delta("", role="assistant"))], ids=["head", "role"])
def test_B038_a_stream_has_as_long_for_its_first_token_as_any_answer(sent: bytes) -> None:
    """vLLM sends the head of a stream at once: a long prefill is no silence between two pieces."""

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + sent), Wait(gate), Send(chunk(delta("a")) + chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        asyncio.get_running_loop().call_later(0.3, gate.set)
        assert (await rig.ask(CHAT_STREAM)).whole
        rig.replica.plans.append([Send(STREAM_HEAD + sent), Hang()])
        answer = await rig.ask(CHAT_STREAM)
        assert not answer.whole and b'"code":"first_byte_timeout"' in answer.body

    with_rig(scenario, timeouts={"idle_s": 0.1, "first_byte_s": 0.6})


def test_B018_progress_is_not_cut_by_the_other_limits() -> None:
    """Much longer in all than any one limit, with something every now and then."""

    async def scenario(rig: Rig) -> None:
        steps: list[Any] = [Send(STREAM_HEAD)]
        loop = asyncio.get_running_loop()
        for index in range(12):
            gate = asyncio.Event()
            loop.call_later(0.1 * (index + 1), gate.set)
            steps += [Wait(gate), Send(chunk(delta("a")))]
        rig.replica.plans.append([*steps, Send(chunk(DONE_EVENT) + LAST_CHUNK)])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert answer.body.count(b"data:") == 13

    with_rig(scenario, timeouts={"idle_s": 0.5, "first_byte_s": 0.5, "client_stall_s": 0.5})


def test_B018_total_timeout_is_a_wish_of_the_operator() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        answer = await rig.ask(CHAT)
        assert answer.status == 504
        assert answer.error["code"] == "total_timeout"
        assert "total_s" in answer.error["message"]
        gate = asyncio.Event()
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate)]
        answer = await rig.ask(CHAT_STREAM)
        assert not answer.whole
        assert b'"code":"total_timeout"' in answer.body
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY  # it did nothing wrong

    with_rig(scenario, timeouts={"total_s": 0.2})


def test_connect_timeout() -> None:
    async def scenario(rig: Rig) -> None:
        blocked = socket.socket()
        blocked.bind(("127.0.0.1", 0))
        blocked.listen(0)
        port = blocked.getsockname()[1]
        fillers = []
        for _ in range(3):  # fill the backlog: the next SYN is not answered
            filler = socket.socket()
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
            fillers.append(filler)
        rig.plane.service.pool(rig.fleet.replicas[0]).port = port
        answer = await rig.ask(CHAT)
        assert answer.status == 504
        assert answer.error["code"] == "connect_timeout"
        assert rig.fleet.replicas[0].health.state is HealthState.EJECTED
        for one in (blocked, *fillers):
            one.close()

    with_rig(scenario, timeouts={"connect_s": 0.2})


async def _stalled_client(rig: Rig, body: Any, receive_bytes: int = 4096) -> socket.socket:
    """A client that sends a request and reads nothing."""
    host, _, port = rig.plane.address.rpartition(":")
    one = socket.socket()
    one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_bytes)
    one.setblocking(False)
    await asyncio.get_running_loop().sock_connect(one, (host, int(port)))
    data = json.dumps(body).encode()
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(data)
    await asyncio.get_running_loop().sock_sendall(one, request + data)
    return one


def test_B073_a_client_that_does_not_read_pauses_its_replica() -> None:
    pieces = 400

    async def scenario(rig: Rig) -> None:
        piece = chunk(delta("x" * 500_000))
        for _ in range(5):
            rig.replica.plans.append(
                [Send(STREAM_HEAD), *(Send(piece) for _ in range(pieces)), Send(LAST_CHUNK)]
            )
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        clients = [await _stalled_client(rig, CHAT_STREAM) for _ in range(5)]
        await until(lambda: rig.replica.answering == 5)
        await _until_it_rests(lambda: rig.replica.sent_bytes)
        assert rig.replica.sent_bytes < 5 * 40 * len(piece)  # of 5 * 400: kernel buffers, not ours
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 60_000  # of a gigabyte
        rig.replica.default = [Send(sized(completion()))]
        for _ in range(5):
            assert (await rig.ask(CHAT)).status == 200  # others are not touched
        for client in clients:
            client.close()
        await until(lambda: rig.replica.aborted == 5)

    with_rig(scenario)


async def _until_it_rests(value: Any) -> None:
    """Poll until ``value()`` has not changed for some time."""
    last, since = value(), 0
    while since < 40:
        await asyncio.sleep(0.005)
        now = value()
        since = since + 1 if now == last else 0
        last = now


def test_a_slow_client_gets_everything() -> None:
    async def scenario(rig: Rig) -> None:
        piece = chunk(delta("y" * 100_000))
        rig.replica.plans.append(
            [Send(STREAM_HEAD), *(Send(piece) for _ in range(60)), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        one = await _stalled_client(rig, CHAT_STREAM)
        await _until_it_rests(lambda: rig.replica.sent_bytes)
        got = b""
        while not got.endswith(LAST_CHUNK):
            got += await asyncio.get_running_loop().sock_recv(one, 65536)
        assert got.partition(b"\r\n\r\n")[2] == piece * 60 + chunk(DONE_EVENT) + LAST_CHUNK
        one.close()

    with_rig(scenario)


def test_B073_B141_a_client_that_takes_nothing_is_cut() -> None:
    async def scenario(rig: Rig) -> None:
        piece = chunk(delta("x" * 500_000))
        rig.replica.plans.append([Send(STREAM_HEAD), *(Send(piece) for _ in range(100)), Hang()])
        one = await _stalled_client(rig, CHAT_STREAM)
        await until(lambda: rig.replica.aborted == 1)
        assert rig.counters.client_disconnects == 1
        one.close()

    with_rig(scenario, timeouts={"client_stall_s": 0.3, "idle_s": 60.0})


def test_a_client_that_never_reads_its_last_answer_is_cut() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(b"x" * 6_000_000))]
        one = await _stalled_client(rig, CHAT)
        await until(lambda: len(rig.replica.requests) == 1)
        await until(lambda: rig.counters.open_client_connections == 0)
        one.close()

    with_rig(scenario, timeouts={"client_stall_s": 0.3})


def test_the_idle_limit_does_not_count_against_a_paused_replica() -> None:
    async def scenario(rig: Rig) -> None:
        piece = chunk(delta("x" * 500_000))
        rig.replica.plans.append(
            [Send(STREAM_HEAD), *(Send(piece) for _ in range(30)), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        one = await _stalled_client(rig, CHAT_STREAM)
        await _until_it_rests(lambda: rig.replica.sent_bytes)
        await asyncio.sleep(0.3)  # longer than idle_s: the client's doing, not the replica's
        assert rig.counters.in_flight == 1
        got = 0
        while got < 30 * len(piece):
            got += len(await asyncio.get_running_loop().sock_recv(one, 1 << 20))
        await until(lambda: rig.counters.in_flight == 0)
        assert rig.counters.broken_streams == 0
        one.close()

    with_rig(scenario, timeouts={"idle_s": 0.15})


def test_pipelining_without_reading_is_bounded() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(b"x" * 100_000))]
        host, _, port = rig.plane.address.rpartition(":")
        one = socket.socket()
        one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        one.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(one, (host, int(port)))
        await loop.sock_sendall(one, b"GET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n" * 1000)
        await until(lambda: len(rig.replica.requests) > 0)
        await _until_it_rests(lambda: len(rig.replica.requests))
        assert len(rig.replica.requests) < 200  # it does not fetch what nobody takes
        one.close()

    with_rig(scenario)


def test_what_is_sent_ahead_is_not_hoarded() -> None:
    """A client that goes on sending while its request is served is made to wait by TCP."""

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Wait(gate), Send(sized(completion()))])
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: rig.replica.answering == 1)
        body = b'{"a":"' + b"x" * 40_000_000 + b'"}'
        client.writer.write(
            b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(body) + body
        )
        transport = client.writer.transport
        await _until_it_rests(transport.get_write_buffer_size)
        assert transport.get_write_buffer_size() > 20_000_000  # the rest is in the kernel's buffers
        gate.set()
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 200
        assert rig.replica.requests[1].body == body

    with_rig(scenario)


# --- shutdown --------------------------------------------------------------------------------------


def test_B031_readiness_goes_first_and_requests_are_still_taken() -> None:
    async def scenario(rig: Rig) -> None:
        rig.plane.begin_shutdown()
        assert (await rig.ask(b"", "/readiness", method="GET")).status == 503
        assert (await rig.ask(b"", "/health", method="GET")).status == 200
        answer = await rig.ask(CHAT)
        assert answer.status == 200
        assert answer.field("connection") == "close"

    with_rig(scenario)


def test_B031_streams_finish_and_idle_connections_do_not_delay() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        client, idle = await rig.client(), await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("a")
        stopping = asyncio.create_task(rig.plane.stop(10.0))
        assert await idle.closed()
        with pytest.raises(OSError):
            await RawClient.connect(rig.plane.address)
        assert not stopping.done()
        gate.set()
        assert await client.chunk() == DONE_EVENT
        assert await client.chunk() == b""
        assert await client.closed()
        await asyncio.wait_for(stopping, 5.0)

    with_rig(scenario)


def test_B108_what_does_not_finish_is_broken_off() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(STREAM_HEAD + chunk(delta("a"))), Hang()])
        rig.replica.plans.append([Hang()])
        streaming, waiting = await rig.client(), await rig.client()
        await streaming.post(CHAT_STREAM)
        await streaming.head()
        assert await streaming.chunk() == delta("a")
        await waiting.post(CHAT)
        await until(lambda: rig.replica.answering == 2)
        await rig.plane.stop(0.1)
        last = await streaming.chunk()
        assert last is not None
        assert b'"code":"shutting_down"' in last
        assert await streaming.chunk() is None
        answer = await waiting.answer()
        assert answer.status == 503
        assert answer.error["code"] == "shutting_down"
        assert rig.replica.aborted == 2
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY
        assert rig.counters.open_replica_connections == 0

    with_rig(scenario)


def test_half_sent_requests_do_not_delay_the_stop() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{")
        await until(lambda: rig.counters.open_client_connections == 1)
        await asyncio.wait_for(rig.plane.stop(30.0), 5.0)

    with_rig(scenario)
