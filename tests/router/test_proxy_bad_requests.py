"""Requests that are refused as they come: not HTTP/1.1, too large, too slow, of too many values."""

import asyncio
import json

import pytest

from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig

START = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"

BAD: dict[str, bytes] = {
    "length and chunks": START + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "chunks and length": START + b"Transfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n0\r\n\r\n",
    "length twice": START + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}",
    "lengths that differ": START + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "list of lengths": START + b"Content-Length: 2, 2\r\n\r\n{}",
    "signed length": START + b"Content-Length: +2\r\n\r\n{}",
    "hex length": START + b"Content-Length: 0x2\r\n\r\n{}",
    "empty length": START + b"Content-Length:\r\n\r\n{}",
    "negative length": START + b"Content-Length: -1\r\n\r\n{}",
    "huge length": START + b"Content-Length: 99999999999999999999999\r\n\r\n",
    "length of thousands of digits": START + b"Content-Length: " + b"0" * 5000 + b"2\r\n\r\n{}",
    "host with a path": b"GET /v1/x HTTP/1.1\r\nHost: h/x\r\n\r\n",
    "host with credentials": b"GET /v1/x HTTP/1.1\r\nHost: me@h\r\n\r\n",
    "unknown coding": START + b"Transfer-Encoding: xchunked\r\n\r\n",
    "two codings": START + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked not last": START + b"Transfer-Encoding: chunked, gzip\r\n\r\n0\r\n\r\n",
    "coding twice": START + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "coding with a tab": START + b"Transfer-Encoding:\x0bchunked\r\n\r\n0\r\n\r\n",
    "chunks in HTTP/1.0": b"POST /v1/x HTTP/1.0\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "space before colon": START + b"Content-Length : 2\r\n\r\n{}",
    "folded line": START + b"X: a\r\n b\r\n\r\n",
    "line without colon": START + b"X\r\n\r\n",
    "empty name": START + b": x\r\n\r\n",
    "name with a space": START + b"X Y: x\r\n\r\n",
    "NUL in a value": START + b"X: a\0b\r\n\r\n",
    "CR in a value": START + b"X: a\rb\r\n\r\n",
    "bare LF after a value": START + b"X: a\n\r\n",
    "bare LF at the end": START + b"X: a\r\n\n",
    "bare LF everywhere": b"GET /v1/x HTTP/1.1\nHost: h\n\n",
    "no host": b"GET /v1/x HTTP/1.1\r\nX: y\r\n\r\n",
    "two hosts": START + b"Host: other\r\n\r\n",
    "two spaces": b"GET  /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "space at the end": b"GET /v1/x HTTP/1.1 \r\nHost: h\r\n\r\n",
    "tab": b"GET\t/v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "lower case method": b"get /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "unknown method": b"BREW /v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "no version": b"GET /v1/x\r\n\r\n",
    "other protocol": b"GET /v1/x RTSP/1.0\r\nHost: h\r\n\r\n",
    "NUL in the target": b"GET /v1/\0x HTTP/1.1\r\nHost: h\r\n\r\n",
    "bytes over 127 in the target": b"GET /v1/\xc3\xa9 HTTP/1.1\r\nHost: h\r\n\r\n",
    "target that is no target": b"GET v1/x HTTP/1.1\r\nHost: h\r\n\r\n",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "binary": bytes(range(256)),
    "chunk size that is none": START + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
    "chunk size with 0x": START + b"Transfer-Encoding: chunked\r\n\r\n0x2\r\n{}\r\n0\r\n\r\n",
    "chunk size with a sign": START + b"Transfer-Encoding: chunked\r\n\r\n+2\r\n{}\r\n0\r\n\r\n",
    "chunk size with an underscore": START + b"Transfer-Encoding: chunked\r\n\r\n1_0\r\n",
    "chunk size ended by LF": START + b"Transfer-Encoding: chunked\r\n\r\n2\n{}\r\n0\r\n\r\n",
    "chunk longer than it says": START + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}}\r\n0\r\n\r\n",
    "chunk ended by LF": START + b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\n0\r\n\r\n",
    "trailer that is none": START + b"Transfer-Encoding: chunked\r\n\r\n0\r\nx y\r\n\r\n",
    "trailer with LF": START + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX: y\n\r\n",
    "huge chunk size": START + b"Transfer-Encoding: chunked\r\n\r\nfffffffffffffffff\r\n",
    "endless chunk extension": START + b"Transfer-Encoding: chunked\r\n\r\n2;" + b"x" * 9000,
    "endless trailers": START + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"X: yyyyyyyy\r\n" * 2000,
}


@pytest.mark.parametrize("name", list(BAD))
def test_bad_http_is_refused_and_the_connection_closed(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(BAD[name] + b"GET /v1/smuggled HTTP/1.1\r\nHost: h\r\n\r\n")
        answer = await client.answer()
        assert answer.status == 400
        assert answer.error["code"] == "bad_http"
        assert answer.field("connection") == "close"
        assert await client.closed()
        assert not rig.replica.requests

    with_rig(scenario)


@pytest.mark.parametrize("name", list(BAD))
def test_bad_http_is_refused_however_it_is_cut(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        data = BAD[name] + b"GET /v1/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
        client = await rig.client()
        for at in range(0, len(data), 5):
            client.writer.write(data[at : at + 5])
            await asyncio.sleep(0)
        answer = await client.answer()
        assert answer.error["code"] == "bad_http"
        assert await client.closed()
        assert not rig.replica.requests

    with_rig(scenario)


def test_a_good_request_before_a_bad_one_is_served() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.post(CHAT)
        await client.send(BAD["folded line"])
        assert (await client.answer()).status == 200
        assert (await client.answer()).status == 400
        assert await client.closed()

    with_rig(scenario)


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (b"CONNECT h:443 HTTP/1.1", 501),
        (b"GET /v1/x HTTP/2.0", 505),
        (b"GET /v1/x HTTP/0.9", 505),
    ],
)
def test_methods_and_versions_the_router_does_not_speak(line: bytes, status: int) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(line + b"\r\nHost: h\r\n\r\n")
        assert (await client.answer()).status == status
        assert await client.closed()

    with_rig(scenario)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("coding", ["length", "chunked"])
def test_B016_a_body_over_the_limit_is_413(coding: str, whole: bool) -> None:
    limit = 100_000

    async def scenario(rig: Rig) -> None:
        for size, status in ((limit, 200), (limit + 1, 413)):
            body = b"{" + b" " * (size - 2) + b"}"
            client = await rig.client()
            if coding == "length":
                data = START + b"Content-Length: %d\r\n\r\n" % size + body
            else:
                data = START + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (size, body)
            if status == 413 and not whole:
                data = data[: -len(body) // 2] if coding == "length" else data[:-7]
            await client.send(data)
            answer = await client.answer()
            assert answer.status == status
            if status == 413:
                assert answer.error["code"] == "body_too_large"
                assert "limits.body_bytes" in answer.error["message"]
                assert await client.closed()
        assert len(rig.replica.requests) == 1

    with_rig(scenario, limits={"body_bytes": limit})


def test_B016_the_refusal_of_a_large_upload_is_not_lost() -> None:
    """The client goes on writing 20 MB after the refusal; it must still be able to read it."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(START + b"Content-Length: 20000000\r\n\r\n")
        for _ in range(200):
            await client.send(b"x" * 100_000)
        assert (await client.answer()).status == 413

    with_rig(scenario, limits={"body_bytes": 1000})


def test_a_refused_expectation() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(START + b"Expect: 100-continue\r\nContent-Length: 1001\r\n\r\n")
        assert (await client.answer()).status == 413

    with_rig(scenario, limits={"body_bytes": 1000})


@pytest.mark.parametrize("pieces", [1, 50])
def test_a_head_over_the_limit_is_431(pieces: int) -> None:
    async def scenario(rig: Rig) -> None:
        for value, status in ((1000, 200), (5000, 431)):
            data = START + b"X: " + b"x" * value + b"\r\nContent-Length: 0\r\n\r\n"
            client = await rig.client()
            step = len(data) // pieces + 1
            for at in range(0, len(data), step):
                client.writer.write(data[at : at + step])
                await asyncio.sleep(0)
            answer = await client.answer()
            assert answer.status == status
            if status == 431:
                assert answer.error["code"] == "headers_too_large"
                assert await client.closed()

    with_rig(scenario, limits={"header_bytes": 2000})


@pytest.mark.parametrize(
    "part", [b"P", b"POST /v1/x HTTP/1.1\r\nHost: h\r\nX-Slow", START + b"Content-Length: 5\r\n\r\n{"]
)
def test_slow_requests_are_408(part: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(part)
        answer = await client.answer()
        assert answer.status == 408
        assert answer.error["code"] == "request_timeout"
        assert await client.closed()

    with_rig(scenario, timeouts={"client_header_s": 0.1})


def test_a_head_that_drips_is_408_all_the_same() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(START)
        dripping = asyncio.create_task(_drip(client.writer))
        assert (await client.answer()).status == 408
        dripping.cancel()

    with_rig(scenario, timeouts={"client_header_s": 0.2})


async def _drip(writer: asyncio.StreamWriter) -> None:
    while True:
        writer.write(b"X: y\r\n")
        await asyncio.sleep(0.01)


CROWDS = {
    "lists": b'{"messages": [' + b"[]," * 400_000 + b"0]}",
    "objects": b'{"messages": [' + b"{}," * 400_000 + b"{}]}",
    "strings": b'{"x": [' + b'"",' * 400_000 + b"0]}",
    "keys": b"{" + b",".join(b'"%d":1' % key for key in range(150_000)) + b"}",
    "numbers": b'{"prompt": [' + b"1," * 1_600_000 + b"1]}",
    "behind escaped quotes": b'{"a": "\\"", "x": [' + b"[]," * 400_000 + b"0]}",
}


@pytest.mark.parametrize("body", CROWDS.values(), ids=CROWDS)
def test_a_body_of_countless_values_is_refused_unparsed(body: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(body)
        assert answer.status == 413 and json.loads(answer.body)["error"]["code"] == "body_crowded"
        assert not rig.replica.requests
        assert rig.plane.service.counters.in_flight == 0

    with_rig(scenario)


def test_long_texts_and_a_million_token_ids_are_no_crowd() -> None:
    async def scenario(rig: Rig) -> None:
        for prompt in ('[{"say": "hi", },]\\' * 150_000, list(range(1_000_000))):
            answer = await rig.ask({"model": "m", "prompt": prompt}, "/v1/completions")
            assert answer.status == 200

    with_rig(scenario)


def test_bodies_that_never_end_do_not_fill_the_memory() -> None:
    head = b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 90000\r\n\r\n"

    async def scenario(rig: Rig) -> None:
        counters = rig.plane.service.counters
        clients = [await rig.client() for _ in range(3)]
        for client in clients[:2]:
            await client.send(head + b"x" * 40_000)
        await until(lambda: counters.receiving_bytes == 80_000)
        await clients[2].send(head + b"x" * 40_000)
        answer = await clients[2].answer()
        assert answer.status == 503 and answer.error["code"] == "too_much_received"
        assert "100000 bytes" in answer.error["message"] and answer.field("retry-after") == "1"
        await until(lambda: counters.receiving_bytes == 80_000)
        clients[0].leave()
        await until(lambda: counters.receiving_bytes == 40_000)
        await clients[1].send(b"x" * 50_000)
        assert (await clients[1].answer()).status == 200
        assert counters.receiving_bytes == 0 and len(rig.replica.requests) == 1

    with_rig(scenario, limits={"receiving_bytes": 100_000})
