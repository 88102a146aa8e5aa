"""Replicas that break in the middle of an answer: never a clean end, never a fabricated one."""

import asyncio
import json
from typing import Any

import pytest

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    Hang,
    Reset,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawAnswer

TOKENS = [delta(f"t{index}") for index in range(3)]
SENT = b"".join(chunk(token) for token in TOKENS)
CHUNKED_JSON = head(content_type="application/json", transfer_encoding="chunked")
UNTIL_CLOSE = head(content_type="text/event-stream")

BETWEEN_EVENTS: dict[str, list[Any]] = {
    "RST after three tokens": [Send(STREAM_HEAD + SENT), Reset()],
    "FIN between chunks": [Send(STREAM_HEAD + SENT), Close()],
    "FIN after the headers": [Send(STREAM_HEAD), Close()],
    "RST after the role": [Send(STREAM_HEAD + chunk(delta("", role="assistant"))), Reset()],
    "ended in good order without a mark": [Send(STREAM_HEAD + SENT + LAST_CHUNK)],
    "the same in two writes": [Send(STREAM_HEAD + SENT), Send(LAST_CHUNK)],
    "closed where the close is the end, without a mark": [Send(UNTIL_CLOSE + b"".join(TOKENS)), Close()],
    "a chunk size that is none": [Send(STREAM_HEAD + SENT), Send(b"xyz\r\n")],
}
INSIDE: dict[str, list[Any]] = {
    "FIN inside a chunk": [Send(STREAM_HEAD + SENT + chunk(delta("cut"))[:40]), Close()],
    "RST inside a chunk": [Send(STREAM_HEAD + SENT + chunk(delta("cut"))[:40]), Reset()],
    "FIN inside an event, between chunks": [Send(STREAM_HEAD + SENT + chunk(delta("cut")[:20])), Close()],
    "FIN inside a chunk size": [Send(STREAM_HEAD + SENT), Send(b"a"), Close()],
    "half of the last chunk": [Send(STREAM_HEAD + SENT), Send(b"0\r\n"), Close()],
}


def _check_not_clean(rig: Rig, answer: RawAnswer) -> None:
    assert not answer.whole
    assert b"[DONE]" not in answer.body
    assert b'"stop"' not in answer.body
    assert rig.counters.broken_streams == 1
    assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT


@pytest.mark.parametrize("name", list(BETWEEN_EVENTS))
def test_B001_B060_broken_between_events(name: str) -> None:
    """The client gets what came, an error event that SDKs raise, and a broken transfer."""

    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append(BETWEEN_EVENTS[name])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.status == 200
        *events, last = answer.body.removesuffix(b"\n\n").split(b"\n\n")
        error = json.loads(last.removeprefix(b"data: "))["error"]
        assert error["code"] == "replica_broken"
        assert error["type"] == "server_error"
        assert answer.field("x-request-id") in error["message"]
        assert events == [token.removesuffix(b"\n\n") for token in TOKENS[: len(events)]] or "role" in name
        _check_not_clean(rig, answer)

    with_rig(scenario)


SAID = delta("Streams end with data: [DONE]")
LOGPROB = SAID.replace(b'"delta"', b'"logprobs":{"content":[{"token":"error"}]},"delta"')


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (SAID, True),
        (SAID[: SAID.index(b"[DONE]") + len(b"[DONE]")], False),
        (LOGPROB, True),
        (SAID.replace(b'"choices"', b'"error":null,"choices"'), True),
    ],
    ids=["whole", "cut off there", "the model's word error", "no error"],
)
def test_B060_what_an_answer_says_of_its_end_is_no_end(said: bytes, told: bool) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(STREAM_HEAD + chunk(said) + LAST_CHUNK)])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.body.startswith(said) and not answer.whole
        assert (b"replica_broken" in answer.body) is told  # what was cut cannot be added to
        assert rig.counters.broken_streams == 1

    with_rig(scenario)


@pytest.mark.parametrize("name", list(INSIDE))
def test_B001_broken_inside_an_event(name: str) -> None:
    """An event that was cut cannot be taken back: nothing is added, the transfer breaks."""

    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append(INSIDE[name])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.body.startswith(b"".join(TOKENS))
        assert b"error" not in answer.body
        _check_not_clean(rig, answer)

    with_rig(scenario)


@pytest.mark.parametrize("cut", range(1, len(LAST_CHUNK)))
def test_ended_without_a_mark_when_part_of_the_last_chunk_is_out(cut: int) -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(STREAM_HEAD + SENT + LAST_CHUNK[:cut]), Wait(gate), Send(LAST_CHUNK[cut:])]
        )
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.reader.readexactly(len(SENT) + cut) == SENT + LAST_CHUNK[:cut]
        gate.set()
        rest, _ = await client.rest()
        assert rest == LAST_CHUNK[cut:-1]  # never the byte that would make it whole
        assert rig.counters.broken_streams == 1

    with_rig(scenario)


def test_broken_inside_a_chunk_size_adds_no_byte() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Send(STREAM_HEAD + SENT + b"a"), Wait(gate), Close()])
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.reader.readexactly(len(SENT) + 1) == SENT + b"a"
        gate.set()
        assert await client.rest() == (b"", True)

    with_rig(scenario)


@pytest.mark.parametrize("close", [Close(), Reset()])
@pytest.mark.parametrize(
    "sent",
    [
        head(content_type="application/json", content_length="500") + completion()[:100],
        head(content_type="application/json", content_length="500"),
        CHUNKED_JSON + chunk(completion()[:100]),
        CHUNKED_JSON + chunk(completion())[:50],
    ],
)
def test_B001_a_json_answer_that_is_short(sent: bytes, close: Any) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(sent), close])
        answer = await rig.ask(CHAT)
        assert answer.status == 200
        assert b"error" not in answer.body
        _check_not_clean(rig, answer)

    with_rig(scenario)


def test_a_reset_where_the_close_is_the_end_is_no_end() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(head(content_type="application/json") + b'{"a":'), Reset()])
        answer = await rig.ask(CHAT)
        assert answer.field("transfer-encoding") == "chunked"
        _check_not_clean(rig, answer)

    with_rig(scenario)


@pytest.mark.parametrize("sent", [STREAM_HEAD + SENT, UNTIL_CLOSE + b"".join(TOKENS)])
def test_http10_clients_see_a_reset(sent: bytes) -> None:
    """Where only the close ends the body, a good close would be a lie."""

    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(sent), Reset()])
        answer = await rig.ask(CHAT_STREAM, http10=True)
        assert answer.field("transfer-encoding") is None
        assert answer.body == b"" or answer.body.startswith(b"".join(TOKENS))
        _check_not_clean(rig, answer)

    with_rig(scenario)


def test_nothing_is_added_after_done() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(STREAM_HEAD + SENT + chunk(DONE_EVENT)), Reset()])
        answer = await rig.ask(CHAT_STREAM)
        assert not answer.whole
        assert answer.body == b"".join(TOKENS) + DONE_EVENT

    with_rig(scenario)


def test_never_tried_again_after_the_first_byte() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Send(STREAM_HEAD), Reset()]
        assert not (await rig.ask(CHAT_STREAM)).whole
        assert sum(len(replica.requests) for replica in rig.replicas) == 1
        assert rig.counters.retries == 0

    with_rig(scenario, replicas=3)


def test_a_replicas_own_error_event_passes_as_it_is() -> None:
    async def scenario(rig: Rig) -> None:
        error = b'data: {"error": {"message": "engine died", "code": 500}}\n\n'
        rig.replica.plans.append([Send(stream(TOKENS[0], error, done=False))])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert answer.body == TOKENS[0] + error

    with_rig(scenario)


def test_a_finish_reason_without_done_is_an_end() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(stream(delta("a"), delta(None, finish="stop"), done=False))])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert b"[DONE]" not in answer.body  # not sent, so not invented

    with_rig(scenario)


def test_other_event_streams_end_as_they_end() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(stream(b"event: a\ndata: 1\n\n", done=False))])
        answer = await rig.ask({"input": "x", "stream": True}, "/v1/responses")
        assert answer.whole

    with_rig(scenario)


def test_bytes_after_the_answer_do_not_reach_anybody() -> None:
    async def scenario(rig: Rig) -> None:
        extra = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil"
        whole = stream(delta("a", finish="stop"))
        for sent in (whole + extra, head(content_length="2") + b"{}" + extra):
            rig.replica.plans.append([Send(sent)])
            client = await rig.client()
            await client.post(CHAT_STREAM)
            assert (await client.answer()).whole
            await client.post(CHAT)
            answer = await client.answer()
            assert answer.body == completion()
        assert rig.replica.connections == 3  # each time the connection was given up

    with_rig(scenario)


def test_bytes_nobody_asked_for_close_an_idle_connection() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append(
            [Send(head(content_length="2") + b"{}"), Wait(gate), Send(b"HTTP/1.1 200 OK\r\n")]
        )
        assert (await rig.ask(CHAT)).whole
        gate.set()
        await until(lambda: rig.counters.open_replica_connections == 0)
        assert (await rig.ask(CHAT)).body == completion()

    with_rig(scenario, timeouts={"replica_keepalive_s": 60.0})


@pytest.mark.parametrize("with_delay", [False, True])
def test_B098_the_openai_sdk_raises_on_the_error_event(with_delay: bool) -> None:
    openai = pytest.importorskip("openai")

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + SENT), Hang() if with_delay else Reset()]
        client = openai.AsyncOpenAI(base_url=f"http://{rig.plane.address}/v1", api_key="k", max_retries=0)
        seen = []
        async with client:
            with pytest.raises(openai.APIError, match="idle_s" if with_delay else "broke off"):
                async for one in await client.chat.completions.create(
                    model="m", messages=[{"role": "user", "content": "hi"}], stream=True
                ):
                    seen.append(one.choices[0].delta.content)
        assert seen == ["t0", "t1", "t2"]

    with_rig(scenario, timeouts={"idle_s": 0.2})
