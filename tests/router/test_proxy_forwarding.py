"""What of a head reaches the replica and comes back: targets, fields, addresses, ids, keys, reasons."""

import asyncio
from typing import Any

import pytest

from tests.fakes.fake_replica import Send, sized
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.raw_requests import BODY, raw_chunked, raw_post


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
            await client.send(raw_post(body))
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
            raw_post(
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
            raw_post(smuggled, b"Connection: " + name),
            raw_chunked(smuggled, 100, line=b"Connection: " + name),
        ):
            client = await rig.client()
            await client.send(data)
            assert (await client.answer()).status == 200
            await client.send(b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n")
            assert (await client.answer()).json() == {"status": "ok"}
        assert [request.body for request in rig.replica.requests] == [smuggled, smuggled]

    with_rig(scenario)


def test_forwarded_headers_are_continued() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(raw_post(BODY, b"X-Forwarded-For: 10.0.0.9", b"X-Forwarded-Proto: https"))
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
            writer.write(raw_post())
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
