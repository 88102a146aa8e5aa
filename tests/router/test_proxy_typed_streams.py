"""Streams of OpenAI's Responses and of Anthropic's messages: whole only with the event that ends them."""

import json
from typing import Any

import pytest

from router.proxy.typed_stream import TypedStreamWatch, stream_watch
from router.routing.health import HealthState
from tests.fakes.fake_replica import LAST_CHUNK, STREAM_HEAD, Reset, Send, chunk
from tests.fakes.proxy_rig import Rig, with_rig

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
LONG = "w" * 20_000


def typed(kind: str, *, type_last: bool = False, **fields: Any) -> bytes:
    """An event as these APIs have them; ``type_last``: as vLLM orders its fields."""
    data = {**fields, "type": kind} if type_last else {"type": kind, **fields}
    return f"event: {kind}\ndata: {json.dumps(data)}\n\n".encode()


ECHO = {"error": None, "tools": [{"parameters": {"properties": {"error": {"type": "string"}}}}]}
STARTS = {
    RESPONSES: [
        typed("response.created", response=ECHO, sequence_number=0),
        typed("response.output_text.delta", delta='ends: "type":"response.completed"', sequence_number=1),
    ],
    MESSAGES: [
        typed("message_start", message={"usage": {"input_tokens": 9}}),
        typed("content_block_delta", delta={"type": "text_delta", "text": '"type": "message_stop"'}),
    ],
}
ENDS = {
    "completed": (RESPONSES, typed("response.completed", response={}, sequence_number=2)),
    "completed, vLLM's order": (
        RESPONSES,
        typed("response.completed", type_last=True, response={"output": LONG}, sequence_number=2),
    ),
    "completed, a long answer": (RESPONSES, typed("response.completed", response={"output": LONG})),
    "incomplete": (RESPONSES, typed("response.incomplete", response={})),
    "failed": (RESPONSES, typed("response.failed", response={"error": {"code": "server_error"}})),
    "its own error": (RESPONSES, typed("error", code="x", message="died", param=None)),
    "an error without a type": (RESPONSES, b'data: {"error": {"message": "died"}}\n\n'),
    "done": (RESPONSES, b"data: [DONE]\n\n"),
    "message_stop": (MESSAGES, typed("message_stop")),
    "Anthropic's error": (MESSAGES, typed("error", error={"type": "overloaded_error", "message": "busy"})),
}


@pytest.mark.parametrize("name", list(ENDS))
def test_the_event_that_ends_a_stream_does(name: str) -> None:
    path, last = ENDS[name]

    async def scenario(rig: Rig) -> None:
        events = [*STARTS[path], last]
        rig.replica.plans.append([Send(STREAM_HEAD + b"".join(map(chunk, events)) + LAST_CHUNK)])
        answer = await rig.ask({"input": "x", "stream": True}, path)
        assert answer.whole and answer.body == b"".join(events)
        assert rig.counters.broken_streams == 0

    with_rig(scenario)


@pytest.mark.parametrize("broken", [Send(LAST_CHUNK), Reset()], ids=["in good order", "reset"])
@pytest.mark.parametrize("path", list(STARTS))
def test_B060_without_it_the_client_gets_its_apis_error_event(path: str, broken: Any) -> None:
    async def scenario(rig: Rig) -> None:
        events = STARTS[path]
        rig.replica.plans.append([Send(STREAM_HEAD + b"".join(map(chunk, events))), broken])
        answer = await rig.ask({"input": "x", "stream": True}, path)
        assert not answer.whole and answer.body.startswith(b"".join(events))
        kind, data = answer.body[len(b"".join(events)) :].removesuffix(b"\n\n").split(b"\n")
        told = json.loads(data.removeprefix(b"data: "))
        assert kind == b"event: error" and told["type"] == "error"
        if path == RESPONSES:
            assert (told["code"], told["sequence_number"]) == ("replica_broken", 2)
            assert answer.field("x-request-id") in told["message"]
        else:
            assert told["error"]["type"] == "api_error"
            assert "replica_broken" in told["error"]["message"]
        assert rig.counters.broken_streams == 1
        assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT

    with_rig(scenario)


@pytest.mark.parametrize("piece_bytes", [1, 7, 64, 100_000])
@pytest.mark.parametrize("name", ["completed", "completed, vLLM's order", "message_stop"])
def test_a_stream_that_ends_anywhere_before_is_not_whole(name: str, piece_bytes: int) -> None:
    path, last = ENDS[name]
    last = last.replace(LONG.encode(), b"w" * 50)
    events = b"".join((*STARTS[path], last))
    recognized = len(STARTS[path][0])
    for size in (*range(recognized, len(events) - 1), len(events)):
        watch = stream_watch(path.encode())
        assert isinstance(watch, TypedStreamWatch)
        for at in range(0, size, piece_bytes):
            watch.pieces.append(events[at : min(size, at + piece_bytes)])
            watch.grew(len(watch.pieces[-1]))
        assert watch.ended_properly is (size == len(events)), events[:size]


def test_a_stream_of_no_known_form_ends_as_it_ends() -> None:
    async def scenario(rig: Rig) -> None:
        for path in STARTS:
            for events in (b"", b"data: 1\n\n", b'data: {"type":"other"}\n\n'):
                body = chunk(events) if events else b""
                rig.replica.plans.append([Send(STREAM_HEAD + body + LAST_CHUNK)])
                assert (await rig.ask({"input": "x", "stream": True}, path)).whole

    with_rig(scenario)


def test_the_openai_sdk_sees_the_error_event() -> None:
    openai = pytest.importorskip("openai")

    async def scenario(rig: Rig) -> None:
        created = typed("response.created", response={"id": "r", "output": []}, sequence_number=0)
        text = typed(
            "response.output_text.delta",
            delta="Hi",
            item_id="i",
            output_index=0,
            content_index=0,
            logprobs=[],
        )
        rig.replica.plans.append([Send(STREAM_HEAD + chunk(created) + chunk(text) + LAST_CHUNK)])
        client = openai.AsyncOpenAI(base_url=f"http://{rig.plane.address}/v1", api_key="k", max_retries=0)
        seen = []
        async with client:
            with pytest.raises(openai.APIError):  # of the transfer; the event came before
                async for one in await client.responses.create(model="m", input="hi", stream=True):
                    seen.append(one)
        assert [one.type for one in seen] == ["response.created", "response.output_text.delta", "error"]
        assert (seen[2].code, seen[2].sequence_number) == ("replica_broken", 1)

    with_rig(scenario)
