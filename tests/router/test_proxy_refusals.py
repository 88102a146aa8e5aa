"""Requests that are refused: not HTTP/1.1, too large, too slow, no such route, no replica."""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.fake_replica import Send, sized
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


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("POST", "/v1", 404, "not_found"),
        ("POST", "/v2/chat/completions", 404, "not_found"),
        ("GET", "//v1/x", 404, "not_found"),
        ("POST", "/drain/r0", 404, "not_found"),
        ("GET", "/v1/../metrics", 404, "not_found"),
        ("GET", "/v1/%2e%2e/metrics", 404, "not_found"),
        ("GET", "/v1/.%2E/metrics", 404, "not_found"),
        ("GET", "/v1/x/..%2f..%2fmetrics", 404, "not_found"),
        ("GET", "/v1/..\\metrics", 404, "not_found"),
        ("GET", "/v1/./x", 404, "not_found"),
        ("OPTIONS", "*", 404, "not_found"),
        ("POST", "/health", 405, "method_not_allowed"),
        ("DELETE", "/v1/models", 405, "method_not_allowed"),
        ("PUT", "/readiness", 405, "method_not_allowed"),
    ],
)
def test_B013_routes_that_are_not_there(method: str, path: str, status: int, code: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for _ in range(2):  # the connection stays open
            await client.post(b"", path, method=method)
            answer = await client.answer()
            assert answer.status == status
            assert answer.error["code"] == code
            assert (answer.field("allow") == "GET, HEAD") == (status == 405)
        assert not rig.replica.requests

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


def test_idle_connections_are_closed_without_a_word() -> None:
    async def scenario(rig: Rig) -> None:
        fresh, used = await rig.client(), await rig.client()
        await used.post(CHAT)
        assert (await used.answer()).status == 200
        assert await fresh.closed()
        assert await used.closed()

    with_rig(scenario, timeouts={"client_keepalive_s": 0.1})


def test_one_connection_too_many() -> None:
    async def scenario(rig: Rig) -> None:
        clients = [await rig.client() for _ in range(3)]
        await until(lambda: rig.counters.open_client_connections == 3)
        answer = await (await rig.client()).answer()
        assert answer.status == 503
        assert answer.error["code"] == "too_many_connections"
        assert answer.field("retry-after") == "1"
        clients[0].leave()
        await until(lambda: rig.counters.open_client_connections <= 3)
        await clients[1].post(CHAT)
        assert (await clients[1].answer()).status == 200

    with_rig(scenario, limits={"client_connections": 3})


def test_health_readiness_and_models() -> None:
    async def scenario(rig: Rig) -> None:
        for path in ("/health", "/health?x=1", "/readiness", "/v1/models"):
            answer = await rig.ask(b"", path, method="GET")
            assert answer.status == 200
            to_head = await rig.ask(b"", path, method="HEAD")
            assert to_head.fields[:2] == answer.fields[:2]
            assert to_head.body == b""
        rig.fleet.models_reported(0, frozenset({"b", "a"}))
        rig.fleet.models_reported(1, frozenset({"b", "c/d"}))
        answer = await rig.ask(b"", "/v1/models", method="GET")
        assert [model["id"] for model in answer.json()["data"]] == ["a", "b", "c/d"]
        assert {model["object"] for model in answer.json()["data"]} == {"model"}
        rig.fleet.probe_failed(1, 2.0, refused=True)
        answer = await rig.ask(b"", "/v1/models", method="GET")
        assert [model["id"] for model in answer.json()["data"]] == ["a", "b"]
        rig.fleet.probe_failed(0, 2.0, refused=True)
        for path in ("/readiness", "/v1/models"):
            assert (await rig.ask(b"", path, method="GET")).status == 503
        assert (await rig.ask(b"", "/health", method="GET")).status == 200
        assert not any(replica.requests for replica in rig.replicas)

    with_rig(scenario, replicas=2, model="m")


def test_readiness_router_stays_when_no_replica_is_left_and_goes_when_it_stops() -> None:
    """Else a fleet that is down takes all its routers out of their service, and clients get no answer."""

    async def scenario(rig: Rig) -> None:
        async def ready() -> tuple[int, str | None]:
            answer = await rig.ask(b"", "/readiness", method="GET")
            return answer.status, answer.json().get("reason")

        rig.fleet.probe_failed(0, 1.0, refused=True)
        status, reason = await ready()  # no replica was usable yet when it was asked
        assert (status, reason) == (503, "no usable replica")
        rig.fleet.probe_succeeded(0, 10.0)
        assert await ready() == (200, None)
        rig.fleet.probe_failed(0, 11.0, refused=True)
        status, reason = await ready()
        assert status == 200 and reason is not None and reason.startswith("no usable replica")
        rig.plane.begin_shutdown()
        assert await ready() == (503, "stopping")

    with_rig(scenario, replicas=1, readiness="router")


def test_B138_errors_have_the_openai_shape() -> None:
    """Every error of the router's that a request can meet; ``RawAnswer.error`` checks the shape."""

    async def scenario(rig: Rig) -> None:
        assert (await rig.ask({**CHAT, "model": "x"})).error["code"] == "model_not_found"
        assert (await rig.ask(CHAT, "/nowhere")).error["type"] == "invalid_request_error"
        rig.drain(0)
        assert (await rig.ask(CHAT)).error["type"] == "server_error"
        rig.drain(0, on=False)
        await rig.replica.kill()
        assert (await rig.ask(CHAT)).error["code"] == "replica_unreachable"
        assert rig.counters.errors == {
            "model_not_found": 1,
            "not_found": 1,
            "no_replica": 1,
            "replica_unreachable": 1,
        }

    with_rig(scenario, model="m")


@pytest.mark.parametrize("exposed", [False, True])
def test_B140_replicas_are_named_only_if_the_operator_wants_it(exposed: bool) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.replica.kill()
        message = (await rig.ask(CHAT)).error["message"]
        assert ("r0" in message) == exposed
        assert "Errno" not in message
        assert "Error" not in message

    with_rig(scenario, expose_replica_urls=exposed)


CANARIES = ("sk-canary-key", "canary-prompt", "canary-cookie", "canary-query")


def test_B048_no_secret_reaches_a_log(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        fields: dict[str, Any] = {"Authorization": f"Bearer {CANARIES[0]}", "Cookie": CANARIES[2]}
        body = {"model": "m", "messages": [{"role": "user", "content": CANARIES[1]}]}
        path = f"/v1/chat/completions?key={CANARIES[3]}"
        for plan in (
            [Send(b"garbage\r\n\r\n")],
            [Send(sized(b"{}", 500, "No"))],
            [Send(b"HTTP/1.1 200 OK\r\n")],
        ):
            rig.replica.plans.append(plan)
            client = await rig.client()
            await client.post(body, path, **fields)
            if plan[0].data.startswith(b"HTTP/1.1 200"):
                client.leave()
            else:
                await client.answer()
        await rig.replica.kill()
        await rig.ask(body, path, **fields)
        client = await rig.client()
        await client.send(f"POST /v1/x HTTP/1.1\r\nBad Header {CANARIES[0]}\r\n\r\n".encode())
        await client.answer()

    caplog.set_level("DEBUG")
    with_rig(scenario)
    assert caplog.records
    for canary in (*CANARIES, "secret-of-ours"):
        assert canary not in caplog.text


def test_bad_request_ids_do_not_break_log_lines(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        await rig.replica.kill()
        answer = await rig.ask(CHAT, x_request_id="a\tb\xe9" + "c" * 200)
        assert json.loads(answer.body)["error"]["code"] == "replica_unreachable"

    with_rig(scenario)
    lines = [record.getMessage() for record in caplog.records if "request" in record.getMessage()]
    assert len(lines) == 1
    assert lines[0].isprintable()
    assert len(lines[0]) < 300


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


ENGINE_STEERING = (
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    "x-prefiller-host-port",
    "x-llm-d-data-parallel-host-port",
    "x-llm-d-encoder-hosts-ports",
    "x-llm-d-kv-cache-source-host-port",
    "x-llm-d-prefiller-host-port",
)
"""vLLM's rank, and where the sidecar of llm-d has parts of a request computed: the prompt would go there."""


def test_B013_B066_no_header_of_a_client_chooses_rank_or_host() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT, **dict.fromkeys(ENGINE_STEERING, "169.254.169.254:80"), x_kept="a")
        assert answer.status == 200
        (seen,) = rig.replica.requests
        assert seen.field("x-kept") == "a"
        assert not {name for name, _ in seen.fields} & {name.encode() for name in ENGINE_STEERING}

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
