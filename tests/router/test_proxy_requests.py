"""Requests however their bytes are cut, framed or offered: the replica gets the same."""

import asyncio
from typing import Any

import pytest

from tests.fakes.fake_replica import Send, Wait, completion, delta, sized, stream
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.raw_requests import BODY, raw_chunked, raw_post

CUT: dict[str, bytes] = {
    "length": raw_post(),
    "chunked": raw_chunked(BODY, 7, b";x=y", b"X-T: 1\r\n"),
    "get": b"GET /v1/things?a=%2F&b HTTP/1.1\r\nHost: h\r\n\r\n",
    "two": raw_post() + b"GET /v1/things HTTP/1.1\r\nHost: h\r\n\r\n",
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


def test_a_partial_head_after_a_known_one() -> None:
    """Heads that repeat are not judged again; a piece of another one between them must not confuse that."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        other = b"POST /v1/other HTTP/1.1\r\nHost: h\r\nX-Long-Header-Name: x\r\nContent-Length: 2\r\n\r\n{}"
        await client.send(raw_post())
        assert (await client.answer()).status == 200
        for cut in range(1, len(other), 3):
            usual = raw_post()
            for data in (usual[:cut], usual[cut:], usual, other[:cut], other[cut:], raw_post(b"{} ")):
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
        await client.send(raw_post(BODY, b"Expect: 100-continue"))
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
        offer = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAEAA")
        data = raw_post(BODY, *offer)
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
            await client.send(raw_post(body))
            assert (await client.answer()).status == 200
            assert rig.replica.requests[-1].body == body
            client = await rig.client()
            await client.send(raw_chunked(body, 100_000))
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
