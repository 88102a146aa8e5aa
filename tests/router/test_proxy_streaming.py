"""Event streams: passed on as they come, unchanged; first token and usage read on the way."""

import asyncio
import json
from itertools import pairwise
from typing import Any

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Close,
    Send,
    SendByteByByte,
    Wait,
    chunk,
    delta,
    event,
    head,
    sized,
    stream,
    usage_event,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig


def test_each_event_arrives_before_the_next_is_sent() -> None:
    async def scenario(rig: Rig) -> None:
        gates = [asyncio.Event() for _ in range(5)]
        plan: list[Any] = [Send(STREAM_HEAD)]
        for index, gate in enumerate(gates):
            plan += [Wait(gate), Send(chunk(delta(f"t{index}")))]
        rig.replica.plans.append([*plan, Send(chunk(DONE_EVENT) + LAST_CHUNK)])
        client = await rig.client()
        await client.post(CHAT_STREAM)
        answer = await client.head()
        assert answer.status == 200
        assert answer.field("x-accel-buffering") == "no"
        for index, gate in enumerate(gates):
            gate.set()
            assert await client.chunk() == delta(f"t{index}")
        assert await client.chunk() == DONE_EVENT
        assert await client.chunk() == b""

    with_rig(scenario)


@pytest.mark.parametrize("accept", [None, "text/event-stream"])
@pytest.mark.parametrize(
    "content_type", ["text/event-stream", "text/event-stream; charset=utf-8", "Text/Event-Stream"]
)
def test_B076_no_cell_of_the_matrix_buffers(accept: str | None, content_type: str) -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        stream_head = head(Content_TYPE=content_type, transfer_encoding="chunked")
        rig.replica.plans.append(
            [Send(stream_head + chunk(delta("a"))), Wait(gate), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        client = await rig.client()
        fields: dict[str, Any] = {"accept": accept} if accept else {}
        await client.post({**CHAT_STREAM, "logprobs": True, "n": 2}, **fields)
        await client.head()
        assert await client.chunk() == delta("a")  # the replica has not gone on
        gate.set()
        assert await client.chunk() == DONE_EVENT

    with_rig(scenario)


def test_B037_characters_split_one_byte_per_segment() -> None:
    async def scenario(rig: Rig) -> None:
        text = "€ 漢字 🎉 é"
        events = [delta(text), delta("🎉" * 3), delta(None, finish="stop"), usage_event(7, 3, 2)]
        rig.replica.plans.append([SendByteByByte(stream(*events))])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert answer.body == b"".join(events) + DONE_EVENT
        assert rig.counters.prompt_tokens == 7
        assert rig.counters.output_tokens == 3
        assert rig.counters.cached_tokens == 2
        assert sum(rig.counters.ttft_s.counts) == 1

    with_rig(scenario)


def _framings(events: list[bytes]) -> dict[str, list[bytes]]:
    """The same payload in different chunks."""
    payload = b"".join(events)
    return {
        "one event per chunk": [chunk(one) for one in events],
        "all in one write": [b"".join(chunk(one) for one in events)],
        "all in one chunk": [chunk(payload)],
        "seven bytes per chunk": [chunk(payload[at : at + 7]) for at in range(0, len(payload), 7)],
        "chunks across writes": [
            b"".join(chunk(one) for one in events)[at : at + 11] for at in range(0, 3000, 11)
        ],
        "with extensions": [b'%x;a=b;c="d"\r\n%b\r\n' % (len(one), one) for one in events],
    }


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("framing", list(_framings([b""])))
def test_B100_events_and_chunks_are_different_things(framing: str, newline: bytes) -> None:
    events = [
        b": hello\n\n",
        delta("", role="assistant"),
        delta("a"),
        delta("b", finish="stop"),
        usage_event(9, 2, 3),
    ]
    events = [one.replace(b"\n", newline) for one in [*events, DONE_EVENT]]

    async def scenario(rig: Rig) -> None:
        writes = [write for write in _framings(events)[framing] if write]
        rig.replica.plans.append([Send(STREAM_HEAD), *(Send(write) for write in writes), Send(LAST_CHUNK)])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert answer.body == b"".join(events)
        assert (rig.counters.prompt_tokens, rig.counters.output_tokens, rig.counters.cached_tokens) == (
            9,
            2,
            3,
        )
        assert sum(rig.counters.ttft_s.counts) == 1

    with_rig(scenario)


NO_CONTENT = [
    b": comment\n\n",
    delta("", role="assistant"),
    delta(None),
    event({"choices": []}),
    event({"choices": [{"delta": {"tool_calls": []}}]}),
    b"event: ping\ndata:\n\n",
    b"data: not json {\n\n",
    b"retry: 10\n\n",
]
CONTENT = [
    delta("x"),
    event({"choices": [{"delta": {"reasoning_content": "hm"}}]}),
    event({"choices": [{"delta": {"tool_calls": [{"index": 0, "id": "a"}]}}]}),
    event({"choices": [{"text": "x"}]}),
    event({"type": "response.output_text.delta", "delta": "x"}),
]


@pytest.mark.parametrize("content", CONTENT)
def test_B113_the_first_token_is_the_first_event_with_content(content: bytes) -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        quiet = b"".join(chunk(one) for one in NO_CONTENT)
        rest = chunk(content), chunk(delta("y", finish="stop")), chunk(DONE_EVENT), LAST_CHUNK
        rig.replica.plans.append([Send(STREAM_HEAD + quiet), Wait(gate), Send(b"".join(rest))])
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        for one in NO_CONTENT:
            assert await client.chunk() == one
        assert sum(rig.counters.first_byte_s.counts) == 1
        assert sum(rig.counters.ttft_s.counts) == 0
        assert rig.fleet.replicas[0].ledger.queued == 1
        gate.set()
        await until(lambda: sum(rig.counters.ttft_s.counts) == 1)
        while await client.chunk():
            pass

    with_rig(scenario)


def test_B113_a_stream_without_a_token_has_no_ttft() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(stream(delta("", role="assistant"), delta(None, finish="length")))])
        assert (await rig.ask(CHAT_STREAM)).whole
        assert sum(rig.counters.ttft_s.counts) == 0
        assert sum(rig.counters.first_byte_s.counts) == 1

    with_rig(scenario)


@pytest.mark.parametrize("size", [700_000, 5_000_000])
def test_B071_one_very_long_line(size: int) -> None:
    async def scenario(rig: Rig) -> None:
        events = [delta("x" * size), delta("y"), delta(None, finish="stop"), usage_event(5, 1, 0)]
        rig.replica.plans.append([Send(stream(*events))])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert answer.body == b"".join(events) + DONE_EVENT
        assert rig.counters.prompt_tokens == 5

    with_rig(scenario)


def test_B071_a_line_without_an_end_is_not_collected() -> None:
    """Beyond a megabyte the router stops looking for the line's end and takes it for content."""

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        piece = chunk(b"x" * 100_000)
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(b"data: ")), *(Send(piece) for _ in range(12)), Wait(gate)]
        )
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        for _ in range(13):
            await client.chunk()
        await until(lambda: sum(rig.counters.ttft_s.counts) == 1)
        gate.set()

    with_rig(scenario)


def test_trailers_and_extensions_pass() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(delta("a") + DONE_EVENT) + b"0\r\nX-Sum: 1\r\n\r\n")]
        )
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        rest = await client.reader.readuntil(b"X-Sum: 1\r\n\r\n")
        assert rest == chunk(delta("a") + DONE_EVENT) + b"0\r\nX-Sum: 1\r\n\r\n"
        await client.post(CHAT)  # and the connection goes on
        assert (await client.answer()).status == 200

    with_rig(scenario)


def test_a_stream_that_ends_at_the_close_becomes_chunks() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        first, second = delta("a"), delta("b", finish="stop") + DONE_EVENT
        rig.replica.plans.append(
            [Send(head(content_type="text/event-stream") + first), Wait(gate), Send(second), Close()]
        )
        client = await rig.client()
        await client.post(CHAT_STREAM)
        answer = await client.head()
        assert answer.field("transfer-encoding") == "chunked"
        assert await client.chunk() == first
        gate.set()
        assert await client.chunk() == second
        assert await client.chunk() == b""
        await client.post(CHAT)
        assert (await client.answer()).status == 200

    with_rig(scenario)


def test_compressed_answers_pass_untouched() -> None:
    async def scenario(rig: Rig) -> None:
        blob = bytes(range(256)) * 10
        rig.replica.plans.append([Send(sized(blob, content_encoding="gzip"))])
        answer = await rig.ask(CHAT)
        assert answer.body == blob
        assert answer.field("content-encoding") == "gzip"
        stream_head = head(
            content_type="text/event-stream", content_encoding="gzip", transfer_encoding="chunked"
        )
        rig.replica.plans.append([Send(stream_head + chunk(blob) + LAST_CHUNK)])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole
        assert answer.body == blob

    with_rig(scenario)


def test_usage_of_a_json_answer_is_learnt() -> None:
    async def scenario(rig: Rig) -> None:
        usage = {"prompt_tokens": 11, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
        for body in (
            {"usage": usage, "choices": ["x" * 10_000]},
            {"choices": ["x" * 2_000_000], "usage": usage},
        ):
            rig.replica.plans.append([Send(sized(json.dumps(body).encode()))])
            await rig.ask(CHAT)
        for odd in (b"[]", b"{", b'{"usage": 3}', b'{"usage":{"prompt_tokens":"x"}}', b""):
            rig.replica.plans.append([Send(sized(odd))])
            assert (await rig.ask(CHAT)).body == odd
        counters = rig.counters
        assert (counters.prompt_tokens, counters.output_tokens, counters.cached_tokens) == (22, 6, 10)

    with_rig(scenario)


def test_many_streams_at_once_stay_apart() -> None:
    async def scenario(rig: Rig) -> None:
        async def one(name: str) -> None:
            body = {**CHAT_STREAM, "messages": [{"role": "user", "content": name}]}
            answer = await rig.ask(body)
            assert answer.whole
            assert name.encode() in answer.body

        def echo(request: Any) -> list[Any]:
            name = json.loads(request.body)["messages"][0]["content"]
            return [
                Send(STREAM_HEAD),
                *(Send(chunk(delta(name))) for _ in range(5)),
                Send(chunk(DONE_EVENT) + LAST_CHUNK),
            ]

        for replica in rig.replicas:
            replica.default = echo
        await asyncio.gather(*(one(f"stream-{index:03d}") for index in range(60)))

    with_rig(scenario, replicas=3)


def test_order_of_events_is_kept() -> None:
    async def scenario(rig: Rig) -> None:
        events = [delta(str(index)) for index in range(500)]
        rig.replica.plans.append(
            [Send(STREAM_HEAD), *(Send(chunk(one)) for one in events), Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        answer = await rig.ask(CHAT_STREAM)
        numbers = [
            int(json.loads(line[6:])["choices"][0]["delta"]["content"])
            for line in answer.body.split(b"\n\n")[:500]
        ]
        assert all(b == a + 1 for a, b in pairwise(numbers))

    with_rig(scenario)
