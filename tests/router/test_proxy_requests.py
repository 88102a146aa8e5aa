"""Requests: what reaches the replica, whatever way the client's bytes are cut."""

import asyncio
import json
from typing import Any

import pytest

from tests.fakes.fake_replica import Send, Wait, completion, delta, sized, stream
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig

BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "h\u00e9 \u6f22 \U0001f389"}]}, ensure_ascii=False
).encode()


def _post(body: bytes = BODY, *lines: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    head = [b"POST " + path + b" HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def _chunked(
    body: bytes, size: int, extension: bytes = b"", trailers: bytes = b"", line: bytes = b"X: y"
) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
        + line
        + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )


CUT: dict[str, bytes] = {
    "length": _post(),
    "chunked": _chunked(BODY, 7, b";x=y", b"X-T: 1\r\n"),
    "get": b"GET /v1/things?a=%2F&b HTTP/1.1\r\nHost: h\r\n\r\n",
    "two": _post() + b"GET /v1/things HTTP/1.1\r\nHost: h\r\n\r\n",
}


@pytest.mark.parametrize("name", list(CUT))
def test_cut_at_every_byte(name: str) -> None:
    data = CUT[name]
    expected = 2 if name == "two" else 1

    async def scenario(rig: Rig) -> None:
        for cut in range(1, len(data)):
            seen = len(rig.replica.requests)
            client = await rig.client()
            await client.send(data[:cut])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            await client.send(data[cut:])
            for _ in range(expected):
                assert (await client.answer()).body == completion()
            client.leave()
            requests = rig.replica.requests[seen:]
            assert len(requests) == expected
            assert requests[0].body == (b"" if name == "get" else BODY)
            if name == "get":
                assert requests[0].target == b"/v1/things?a=%2F&b"

    with_rig(scenario)


@pytest.mark.parametrize("name", list(CUT))
def test_one_byte_at_a_time(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for byte in CUT[name]:
            client.writer.write(bytes([byte]))
            await asyncio.sleep(0)
        for _ in range(2 if name == "two" else 1):
            assert (await client.answer()).status == 200

    with_rig(scenario)


def test_an_answer_cut_at_every_byte() -> None:
    answers = [
        sized(completion("h\u00e9")),
        stream(delta("\U0001f389"), delta(None, finish="stop")),
        b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n" + sized(b"{}"),
    ]

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for whole in answers:
            await client.post(CHAT)
            rig.replica.plans.append([Send(whole)])
            expected = (await client.answer()).body
            for cut in range(1, len(whole)):
                rig.replica.plans.append([Send(whole[:cut]), Wait(_soon()), Send(whole[cut:])])
                await client.post(CHAT)
                answer = await client.answer()
                assert (answer.status, answer.body, answer.whole) == (200, expected, True)
        assert rig.replica.connections == 1

    with_rig(scenario)


def _soon() -> asyncio.Event:
    """A gate that opens in the loop's next rounds: what was written before is read before."""
    gate = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.call_soon(lambda: loop.call_soon(gate.set))
    return gate


def test_B143_target_and_body_unchanged_byte_for_byte() -> None:
    targets = [
        b"/v1/models/org%2Fname?q=a%2Bb%20c&x=%27",
        b"/v1/x?a=b&a=b&&=",
        b"/v1/x?",
        b"/v1/%e6%bc%a2;p=1?q=?#",
        b"/v1/a..b/c.",
        b"/v1//double",
    ]
    bodies = [
        b'{"a": 1.0e5, "a":1, "b" :  [ ], "z":123456789012345678901234567890}',
        b"{\n\t}\n",
        b'{"messages":[{"role":"user","content":"x \\ud83d"}]}',
        b"\xef\xbb\xbf{}",
        b"\xff\xfe\x00",
        b"[1,2]",
        b"{",
        b'{"prompt":[[1,2],[3]]}',
        b'{"n":NaN}',
        b"[" * 100_000,
        b'{"model":null,"model":3,"messages":7}',
        b'{"a":' + b"9" * 5000 + b"}",
        b"",
        b"--boundary\r\nform data\r\n",
    ]

    async def scenario(rig: Rig) -> None:
        for target in targets:
            client = await rig.client()
            await client.send(b"GET " + target.partition(b"#")[0] + b" HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].target == target.partition(b"#")[0]
        for body in bodies:
            client = await rig.client()
            await client.send(_post(body))
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].body == body
            assert rig.replica.requests[-1].field("content-length") == str(len(body))

    with_rig(scenario)


def test_any_method_and_path_under_v1_reaches_a_replica() -> None:
    async def scenario(rig: Rig) -> None:
        for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
            for path in ("/v1/embeddings", "/v1/files/x", "/v1/models/m"):
                assert (await rig.ask(b"", path, method=method)).status == 200
                seen = rig.replica.requests[-1]
                assert (seen.method.decode(), seen.target.decode()) == (method, path)

    with_rig(scenario)


def test_absolute_form() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(b"GET http://evil.example:80/v1/x?y=1 HTTP/1.1\r\nHost: other\r\n\r\n")
        assert (await client.answer()).status == 200
        seen = rig.replica.requests[0]
        assert seen.target == b"/v1/x?y=1"
        assert seen.field("host") == f"127.0.0.1:{rig.replica.port}"

    with_rig(scenario)


def test_B096_hop_by_hop_and_nominated_headers_stay_here() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(
            _post(
                BODY,
                b"CONNECTION: keep-alive, X-Secret",
                b"Connection: x-other",
                b"X-Secret: 1",
                b"x-OTHER: 2",
                b"TE: trailers",
                b"Keep-Alive: timeout=5",
                b"Proxy-Authorization: Basic x",
                b"Proxy-Connection: keep-alive",
                b"Trailer: a",
                b"Upgrade: h2c",
                b"HTTP2-Settings: x",
                b"Accept-Encoding: br",
                b"Expect: 100-continue",
                b"X-Warmroute-Policy: random",
                b"X-Kept:  as it  is\t",
                b"x-empty:",
                b"Accept: */*",
                b"X-Twice: 1",
                b"X-Twice: 2",
            )
        )
        assert (await client.answer()).status == 200
        seen = rig.replica.requests[0]
        names = sorted(name.decode() for name, _ in seen.fields)
        assert names == [
            "accept",
            "accept-encoding",
            "content-length",
            "host",
            "via",
            "x-empty",
            "x-forwarded-for",
            "x-forwarded-proto",
            "x-kept",
            "x-request-id",
            "x-twice",
            "x-twice",
        ]
        assert seen.field("host") == f"127.0.0.1:{rig.replica.port}"
        assert seen.field("accept-encoding") == "identity"
        assert seen.field("x-forwarded-for") == "127.0.0.1"
        assert seen.field("x-forwarded-proto") == "http"
        assert b"X-Kept:  as it  is\t\r\n" in seen.raw_head

    with_rig(scenario)


@pytest.mark.parametrize("name", [b"transfer-encoding", b"content-length", b"host"])
def test_framing_cannot_be_nominated_away(name: bytes) -> None:
    """Otherwise the body would be read as the next request."""

    async def scenario(rig: Rig) -> None:
        smuggled = b"GET /v1/smuggled HTTP/1.1\r\nHost: h\r\n\r\n"
        for data in (
            _post(smuggled, b"Connection: " + name),
            _chunked(smuggled, 100, line=b"Connection: " + name),
        ):
            client = await rig.client()
            await client.send(data)
            assert (await client.answer()).status == 200
            await client.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await client.answer()).json() == {"status": "ok"}
        assert [request.body for request in rig.replica.requests] == [smuggled, smuggled]

    with_rig(scenario)


def test_a_partial_head_after_a_known_one() -> None:
    """Heads that repeat are not judged again; a piece of another one between them must not confuse that."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        other = b"POST /v1/other HTTP/1.1\r\nHost: h\r\nX-Long-Header-Name: x\r\nContent-Length: 2\r\n\r\n{}"
        await client.send(_post())
        assert (await client.answer()).status == 200
        for cut in range(1, len(other), 3):
            for data in (_post()[:cut], _post()[cut:], _post(), other[:cut], other[cut:], _post(b"{} ")):
                await client.send(data)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            for _ in range(4):
                assert (await client.answer()).status == 200
            assert [request.body for request in rig.replica.requests[-4:]] == [BODY, BODY, b"{}", b"{} "]

    with_rig(scenario)


def test_lengths_written_oddly() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        for length in (b"2", b"002", b"  2 ", b"2\t", b"2"):
            await client.send(b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length:" + length + b"\r\n\r\n{}")
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].body == b"{}"
            assert rig.replica.requests[-1].field("content-length") == "2"

    with_rig(scenario)


def test_forwarded_headers_are_continued() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(_post(BODY, b"X-Forwarded-For: 10.0.0.9", b"X-Forwarded-Proto: https"))
        await client.answer()
        seen = rig.replica.requests[0]
        assert seen.field("x-forwarded-for") == "10.0.0.9, 127.0.0.1"
        assert seen.field("x-forwarded-proto") == "https"

    with_rig(scenario)


def test_clients_whose_requests_are_the_same_are_told_apart_by_address() -> None:
    async def scenario(rig: Rig) -> None:
        host, port = rig.plane.address.split(":")
        addresses = "127.0.0.1", "127.0.0.2", "127.0.0.2", "127.0.0.1"
        for address in addresses:
            _, writer = await asyncio.open_connection(host, int(port), local_addr=(address, 0))
            seen = len(rig.replica.requests)
            writer.write(_post())
            await until(lambda seen=seen: len(rig.replica.requests) > seen)
            writer.close()
        assert [request.field("x-forwarded-for") for request in rig.replica.requests] == list(addresses)

    with_rig(scenario)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("abc-1", "abc-1"),
        ("a b\tc", "abc"),
        ("x" * 300, "x" * 128),
        ("caf\xe9<script>", "caf<script>"),
        (" ", None),
    ],
)
def test_request_id_is_cleaned_forwarded_and_echoed(given: str, expected: str | None) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT, x_request_id=given)
        seen = rig.replica.requests[0].field("x-request-id")
        assert answer.field("x-request-id") == seen
        assert seen == expected or (expected is None and seen is not None and seen.startswith("wr-"))

    with_rig(scenario)


def test_request_ids_made_by_the_router_are_unique() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(b"{}", x_request_id="theirs"))]
        ids = [(await rig.ask(CHAT)).field("x-request-id") for _ in range(20)]
        assert len(set(ids)) == 20
        assert "theirs" not in ids
        assert ids == [request.field("x-request-id") for request in rig.replica.requests]

    with_rig(scenario)


KEY_CASES: list[tuple[dict[str, Any], str | None]] = [
    ({}, None),
    ({"forward_client_key": True}, "Bearer client"),
    ({"api_key": "ours"}, "Bearer ours"),
    ({"api_key": "ours", "forward_client_key": True}, "Bearer ours"),
]


@pytest.mark.parametrize(("config", "expected"), KEY_CASES)
def test_B086_keys(config: dict[str, Any], expected: str | None) -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT, Authorization="Bearer client", X_Api_Key="client2", Api_Key="client3")
        seen = rig.replica.requests[0]
        assert seen.field("authorization") == expected
        forwarded = "client2" if expected == "Bearer client" else None
        assert seen.field("x-api-key") == forwarded
        assert b"ours" not in answer.body + repr(answer.fields).encode()

    with_rig(scenario, **config)


def test_redirects_are_passed_not_followed() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(b"", 302, "Found", location="http://elsewhere.example/"))]
        answer = await rig.ask(CHAT)
        assert answer.status == 302
        assert answer.field("location") == "http://elsewhere.example/"
        assert len(rig.replica.requests) == 1

    with_rig(scenario, api_key="ours")


def test_routing_headers() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask(CHAT)
        assert answer.field("x-warmroute-replica") == "r0"
        assert answer.field("x-warmroute-reason") == "balanced"
        assert answer.field("x-warmroute-matched-tokens") == "0"

    with_rig(scenario, replicas=2, expose_routing=True)


def test_routing_headers_are_off_by_default() -> None:
    async def scenario(rig: Rig) -> None:
        assert not any(name.startswith("x-warmroute") for name, _ in (await rig.ask(CHAT)).fields)

    with_rig(scenario)


def test_a_warm_prefix_is_routed_to_its_replica() -> None:
    async def scenario(rig: Rig) -> None:
        prompt = {"model": "m", "messages": [{"role": "user", "content": "word " * 4000}]}
        first = await rig.ask(prompt)
        second = await rig.ask(prompt)
        assert second.field("x-warmroute-replica") == first.field("x-warmroute-replica")
        assert second.field("x-warmroute-reason") == "warm"
        assert int(second.field("x-warmroute-matched-tokens") or 0) > 1000

    with_rig(scenario, replicas=4, policy={"kind": "prefix_affinity"}, expose_routing=True)


def test_expect_continue() -> None:
    async def scenario(rig: Rig) -> None:
        for lines in (b"Content-Length: %d" % len(BODY), b"Transfer-Encoding: chunked"):
            client = await rig.client()
            await client.send(
                b"POST /v1/x HTTP/1.1\r\nHost: h\r\nExpect: 100-Continue\r\n" + lines + b"\r\n\r\n"
            )
            assert await client.reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(BODY if b"Length" in lines else b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].body == BODY
            assert rig.replica.requests[-1].field("expect") is None

    with_rig(scenario)


def test_no_continue_when_the_body_is_here_or_the_client_is_old() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(_post(BODY, b"Expect: 100-continue"))
        assert (await client.answer()).status == 200
        client = await rig.client()
        await client.send(b"POST /v1/x HTTP/1.0\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n")
        await client.send(b"{}")
        assert (await client.answer()).status == 200

    with_rig(scenario)


def test_an_upgrade_offer_is_declined_and_the_body_read() -> None:
    """Java's HttpClient offers h2c with every request on a plain connection."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        data = _post(BODY, b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAA")
        for part in (data[:-10], data[-10:]):
            await client.send(part)
            await asyncio.sleep(0)
        assert (await client.answer()).status == 200
        assert rig.replica.requests[0].body == BODY
        assert rig.replica.requests[0].field("http2-settings") is None

    with_rig(scenario)


def test_large_bodies_arrive_whole() -> None:
    async def scenario(rig: Rig) -> None:
        for size in (1_100_000, 8_000_000):
            body = b'{"model":"m","prompt":"' + b"x" * size + b'"}'
            client = await rig.client()
            await client.send(_post(body))
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].body == body
            client = await rig.client()
            await client.send(_chunked(body, 100_000))
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].body == body

    with_rig(scenario)


def test_unix_socket(tmp_path: Any) -> None:
    path = tmp_path / "router.sock"

    async def scenario(rig: Rig) -> None:
        assert rig.plane.address == f"unix:{path}"
        assert (await rig.ask(CHAT)).status == 200
        assert rig.replica.requests[0].field("x-forwarded-for") is None

    with_rig(scenario, listen=f"unix:{path}")
    assert not path.exists()
    with_rig(scenario, listen=f"unix:{path}")


def test_new_settings_apply_to_new_requests() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.post(CHAT)
        assert (await client.answer()).field("x-warmroute-replica") is None
        rig.plane.apply(rig.config.model_copy(update={"expose_routing": True, "forward_client_key": True}))
        await client.post(CHAT, Authorization="Bearer k")
        assert (await client.answer()).field("x-warmroute-replica") == "r0"
        assert rig.replica.requests[-1].field("authorization") == "Bearer k"

    with_rig(scenario)


def test_the_openai_sdk() -> None:
    openai = pytest.importorskip("openai")

    async def scenario(rig: Rig) -> None:
        client = openai.AsyncOpenAI(base_url=f"http://{rig.plane.address}/v1", api_key="k", max_retries=0)
        messages: list[Any] = [{"role": "user", "content": "hi"}]
        async with client:
            answer = await client.chat.completions.create(model="m", messages=messages)
            assert answer.choices[0].message.content == "hello"
            text = ""
            async for one in await client.chat.completions.create(model="m", messages=messages, stream=True):
                if one.choices:
                    text += one.choices[0].delta.content or ""
            assert text == "hello"
            assert [model.id async for model in await client.models.list()] == ["m"]
            with pytest.raises(openai.NotFoundError, match="No replica serves"):
                await client.chat.completions.create(model="other", messages=messages)
        await until(lambda: rig.counters.open_client_connections == 0)

    with_rig(scenario, model="m")
