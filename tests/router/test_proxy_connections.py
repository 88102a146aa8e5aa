"""HTTP/1.1 between hops: keep-alive, HTTP/1.0, HEAD, pipelining, answers without a body."""

import asyncio
from typing import Any

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    sized,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig


def test_many_requests_on_one_connection_each_side() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for index in range(20):
            await client.post(CHAT_STREAM if index % 2 else CHAT)
            answer = await client.answer()
            assert answer.whole
            assert answer.field("connection") is None
        assert rig.replica.connections == 1

    with_rig(scenario)


def test_connection_close_is_honoured() -> None:
    async def scenario(rig: Rig) -> None:
        for body in (CHAT, CHAT_STREAM):
            client = await rig.client()
            await client.post(body, Connection="close")
            answer = await client.answer()
            assert answer.whole
            assert answer.field("connection") == "close"
            assert await client.closed()
        assert rig.replica.connections == 1  # that was between client and router

    with_rig(scenario)


def test_connection_close_of_the_replica_is_not_the_clients() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(completion(), connection="close")), Close()]
        client = await rig.client()
        for _ in range(3):
            await client.post(CHAT)
            answer = await client.answer()
            assert answer.body == completion()
            assert answer.field("connection") is None
        assert rig.replica.connections == 3

    with_rig(scenario)


def test_B096_headers_of_the_replicas_hop_stay_there() -> None:
    async def scenario(rig: Rig) -> None:
        lines: dict[str, Any] = {
            "connection": "x-hop, keep-alive",
            "x-hop": "1",
            "keep-alive": "timeout=5",
            "upgrade": "h2c",
        }
        rig.replica.default = [
            Send(sized(b"{}", proxy_authenticate="x", set_cookie="a=b", X_Kept="1", server="uv", **lines))
        ]
        answer = await rig.ask(CHAT)
        assert sorted(name for name, _ in answer.fields) == [
            "content-length",
            "content-type",
            "server",
            "set-cookie",
            "x-kept",
            "x-request-id",
        ]

    with_rig(scenario)


@pytest.mark.parametrize("body", [CHAT, CHAT_STREAM])
@pytest.mark.parametrize("keep", [False, True])
def test_http10(body: dict[str, Any], keep: bool) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for _ in range(2):
            await client.post(body, http10=True, **({"Connection": "Keep-Alive"} if keep else {}))
            answer = await client.answer()
            assert answer.status == 200
            assert answer.whole
            assert answer.field("transfer-encoding") is None
            if not keep or body is CHAT_STREAM:
                assert answer.field("connection") == "close"
                assert await client.closed()
                client = await rig.client()
            else:
                assert answer.field("connection") == "keep-alive"
            if body is CHAT_STREAM:
                assert answer.body.startswith(delta("", role="assistant"))
                assert answer.body.endswith(DONE_EVENT)
            else:
                assert answer.body == completion()

    with_rig(scenario)


def test_http10_without_a_host() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"GET /v1/x HTTP/1.0\r\n\r\n")
        assert (await client.answer()).status == 200
        assert rig.replica.requests[0].field("host") == f"127.0.0.1:{rig.replica.port}"

    with_rig(scenario)


def test_http10_replicas() -> None:
    async def scenario(rig: Rig) -> None:
        old = b"HTTP/1.0 200 OK\r\ncontent-type: application/json\r\n"
        rig.replica.plans.append([Send(old + b"\r\n{}"), Close()])
        rig.replica.plans.append([Send(old + b"content-length: 2\r\n\r\n{}"), Close()])
        rig.replica.plans.append([Send(old + b"content-length: 2\r\nconnection: keep-alive\r\n\r\n{}")])
        client = await rig.client()
        for _ in range(4):
            await client.post(CHAT)
            answer = await client.answer()
            assert answer.status == 200
            assert answer.whole
        assert rig.replica.connections == 3  # the third kept its connection for the fourth

    with_rig(scenario)


def test_head() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        cases: list[dict[str, Any]] = [{"content_length": "1234"}, {"transfer_encoding": "chunked"}, {}]
        for fields in cases:
            rig.replica.plans.append([Send(head(content_type="application/json", **fields))])
            await client.post(b"", "/v1/things", method="HEAD")
            answer = await client.answer(to_head=True)
            assert answer.status == 200
            assert answer.field("content-length") == fields.get("content_length")
        await client.post(CHAT)  # nothing is left in the way
        assert (await client.answer()).body == completion()
        assert rig.replica.connections == 1

    with_rig(scenario)


def test_head_when_no_replica_can_answer() -> None:
    async def scenario(rig: Rig) -> None:
        rig.drain(0)
        client = await rig.client()
        await client.post(b"", "/v1/things", method="HEAD")
        answer = await client.answer(to_head=True)
        assert answer.status == 503
        rig.drain(0, on=False)
        await client.post(CHAT)
        assert (await client.answer()).body == completion()

    with_rig(scenario)


@pytest.mark.parametrize("status", [204, 304])
def test_answers_without_a_body(status: int) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        cases: list[dict[str, Any]] = [{}, {"content_length": "0"}, {"etag": "x"}]
        for fields in cases:
            rig.replica.plans.append([Send(head(status, "Nothing", **fields))])
            await client.post(CHAT)
            answer = await client.answer()
            assert answer.status == status
            assert answer.whole
        await client.post(CHAT)
        assert (await client.answer()).body == completion()
        assert rig.replica.connections == 1

    with_rig(scenario)


def test_interim_answers_are_not_the_answer() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append(
            [
                Send(b"HTTP/1.1 100 Continue\r\n\r\n"),
                Send(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n" + sized(completion())),
            ]
        )
        client = await rig.client()
        await client.post(CHAT)
        answer = await client.answer()
        assert (answer.status, answer.body) == (200, completion())
        assert answer.field("link") is None

    with_rig(scenario)


def test_pipelined_requests_are_answered_in_order() -> None:
    async def scenario(rig: Rig) -> None:
        gates = [asyncio.Event() for _ in range(4)]
        for index, gate in enumerate(gates):
            rig.replica.plans.append([Wait(gate), Send(sized(completion(f"answer {index}")))])
        client = await rig.client()
        for index in range(4):
            await client.post(CHAT, f"/v1/x{index}")
        await client.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
        await client.post(CHAT, "/v1/last")
        await until(lambda: rig.replica.answering == 1)
        for gate in reversed(gates):
            gate.set()
        for index in range(4):
            assert (await client.answer()).body == completion(f"answer {index}")
        assert (await client.answer()).json() == {"status": "ok"}
        assert (await client.answer()).status == 200
        assert [request.target for request in rig.replica.requests] == [
            b"/v1/x0",
            b"/v1/x1",
            b"/v1/x2",
            b"/v1/x3",
            b"/v1/last",
        ]

    with_rig(scenario)


def test_one_request_of_a_connection_at_a_time() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Wait(gate), Send(sized(b"{}"))]
        client = await rig.client()
        for _ in range(3):
            await client.post(CHAT)
        await until(lambda: rig.replica.answering == 1)
        other = await rig.client()
        await other.post(CHAT)
        await until(lambda: rig.replica.answering == 2)  # another connection does not wait
        assert len(rig.replica.requests) == 2
        gate.set()
        for _ in range(3):
            assert (await client.answer()).status == 200
        assert (await other.answer()).status == 200

    with_rig(scenario)


def test_thousands_of_pipelined_requests() -> None:
    async def scenario(rig: Rig) -> None:
        rig.drain(0)
        client = await rig.client()
        count = 3000
        client.writer.write(
            b"GET /health HTTP/1.1\r\nHost: h\r\n\r\nGET /v1/x HTTP/1.1\r\nHost: h\r\n\r\n" * count
        )
        for _ in range(count):
            assert (await client.answer()).status == 200
            assert (await client.answer()).status == 503

    with_rig(scenario)


def test_a_pipelined_request_after_close_is_not_served() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(
            b"GET /v1/a HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\nGET /v1/b HTTP/1.1\r\nHost: h\r\n\r\n"
        )
        assert (await client.answer()).status == 200
        assert await client.closed()
        assert len(rig.replica.requests) == 1

    with_rig(scenario)


def test_blank_lines_between_requests() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.post(CHAT)
        await client.send(b"\r\n\r\n")
        await client.post(CHAT)
        for _ in range(2):
            assert (await client.answer()).status == 200
        await client.send(b"\r")
        await client.send(b"\n")
        await client.post(CHAT)
        assert (await client.answer()).status == 200

    with_rig(scenario)


def test_the_next_request_during_a_stream_waits_for_its_end() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a"))), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("a")
        await client.post(CHAT)
        gate.set()
        assert await client.chunk() == DONE_EVENT
        assert await client.chunk() == b""
        assert (await client.answer()).body == completion()

    with_rig(scenario)


@pytest.mark.parametrize("fields", [{}, {"connection": "close"}])
def test_an_answer_before_the_whole_request_was_taken(fields: dict[str, str]) -> None:
    """The replica refuses from the head alone; the refusal passes, its connection is broken off."""
    left = asyncio.Event()

    async def refuse_early(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(head(413, "Too large", content_length="2", **fields) + b"no")
        await left.wait()  # it takes no more, and does not close
        writer.close()

    async def scenario(rig: Rig) -> None:
        big = b'{"model":"m","prompt":"' + b"x" * 30_000_000 + b'"}'
        server = await asyncio.start_server(refuse_early, "127.0.0.1", 0)
        rig.replica.port, real = server.sockets[0].getsockname()[1], rig.replica.port
        pool = rig.plane.service.pool(rig.fleet.replicas[0])
        pool.port = rig.replica.port
        client = await rig.client()
        client.writer.write(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n" % len(big) + big)
        answer = await client.answer()
        assert (answer.status, answer.body) == (413, b"no")
        await until(lambda: rig.counters.open_replica_connections == 0)
        pool.port = rig.replica.port = real
        left.set()
        server.close()
        await client.post(CHAT)
        assert (await client.answer()).status == 200

    with_rig(scenario)


def test_large_answers_pass_whole() -> None:
    async def scenario(rig: Rig) -> None:
        blob = bytes(range(256)) * 40_000
        for answer_bytes in (
            sized(blob, content_type="audio/wav"),
            head(transfer_encoding="chunked")
            + b"".join(chunk(blob[at : at + 60_000]) for at in range(0, len(blob), 60_000))
            + LAST_CHUNK,
        ):
            rig.replica.plans.append([Send(answer_bytes)])
            answer = await rig.ask(CHAT)
            assert answer.whole
            assert answer.body == blob

    with_rig(scenario)


def test_streams_of_different_clients_do_not_wait_for_each_other() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Send(STREAM_HEAD), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)])
        slow = await rig.client()
        await slow.post(CHAT_STREAM)
        await slow.head()
        rig.replica.default = [Send(stream(delta("quick", finish="stop")))]
        for _ in range(10):
            assert (await rig.ask(CHAT_STREAM)).whole
        gate.set()
        assert await slow.chunk() == DONE_EVENT

    with_rig(scenario)
