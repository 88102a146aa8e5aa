"""Bug cases of the category streaming that no test beside the proxy's own proves."""

import asyncio
import json
from typing import Any

import pytest

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Reset,
    Send,
    Step,
    Wait,
    chunk,
    completion,
    delta,
    event,
    sized,
    stream,
    usage_event,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.router_rig import sse_events

MESSAGES: list[Any] = [{"role": "user", "content": "hi"}]


def _sdk(rig: Rig) -> Any:
    openai = pytest.importorskip("openai")
    return openai.AsyncOpenAI(base_url=f"http://{rig.plane.address}/v1", api_key="k", max_retries=0)


def test_B001_a_killed_replica_breaks_its_streams_and_is_blamed_once_each() -> None:
    """The process dies with a stream under way: an error event, a broken transfer, counters back to zero."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("a")
        await rig.replica.kill()
        last = await client.chunk()
        assert last is not None and json.loads(last[6:])["error"]["code"] == "replica_broken"
        assert await client.chunk() is None
        assert rig.counters.broken_streams == 1
        assert rig.counters.errors == {"replica_broken": 1}
        assert not any(rig.booked().values())
        assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT  # one fault of three

    with_rig(scenario)


@pytest.mark.parametrize("status", [429, 500, 503])
def test_B003_an_error_instead_of_a_stream_may_be_tried_elsewhere(status: int) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Send(sized(b"{}", status, "No"))]
        answer = await rig.ask(CHAT_STREAM)
        assert (answer.status, answer.whole) == (200, True)
        assert answer.field("content-type") == "text/event-stream; charset=utf-8"
        assert rig.counters.retries == 1

    with_rig(scenario, replicas=2)


def test_B003_too_many_requests_keeps_its_retry_after() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(b'{"error":{}}', 429, "Slow", retry_after="7"))]
        answer = await rig.ask(CHAT_STREAM)
        assert (answer.status, answer.body, answer.field("retry-after")) == (429, b'{"error":{}}', "7")
        assert answer.field("content-type") == "application/json"

    with_rig(scenario)


def test_B038_silence_of_one_replica_does_not_touch_the_streams_of_another() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
        silent, served = await rig.client(), await rig.client()
        await silent.post(CHAT_STREAM)
        await until(lambda: rig.replicas[0].answering == 1)
        steps: list[Step] = [Send(STREAM_HEAD)]
        for index in range(8):
            gate = asyncio.Event()
            asyncio.get_running_loop().call_later(0.05 * index, gate.set)
            steps += [Wait(gate), Send(chunk(delta(str(index))))]
        rig.replicas[1].default = [*steps, Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        await served.post(CHAT_STREAM)
        answer = await served.answer()
        assert answer.whole and len(sse_events(answer.body)) == 9
        broken = await silent.answer()
        assert not broken.whole and b'"code":"idle_timeout"' in broken.body
        assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT
        assert rig.fleet.replicas[1].health.state is HealthState.HEALTHY

    with_rig(scenario, replicas=2, timeouts={"idle_s": 0.2})


def test_B060_forty_tokens_and_a_close_are_no_finish() -> None:
    """The SDK sees the tokens, no finish reason, and an error."""
    openai = pytest.importorskip("openai")

    async def scenario(rig: Rig) -> None:
        tokens = [delta(f"t{index}") for index in range(40)]
        rig.replica.default = [Send(STREAM_HEAD + b"".join(chunk(token) for token in tokens)), Reset()]
        seen: list[Any] = []
        async with _sdk(rig) as client:
            with pytest.raises(openai.APIError):
                async for one in await client.chat.completions.create(
                    model="m", messages=MESSAGES, stream=True
                ):
                    seen.append(one.choices[0])
        assert [choice.delta.content for choice in seen] == [f"t{index}" for index in range(40)]
        assert {choice.finish_reason for choice in seen} == {None}

    with_rig(scenario)


def test_B072_the_router_adds_no_frame_and_passes_comments_unharmed() -> None:
    """A replica that is quiet for long, or keeps its stream alive by comments: the SDK reads both."""
    comments = [b": keep-alive\n\n", b":\n\n"]
    events = [delta("a"), *comments, delta("b"), delta(None, finish="stop")]

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Wait(gate), Send(stream(*comments, *events))])
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await until(lambda: rig.replica.answering == 1)
        with pytest.raises(TimeoutError):  # nothing before the replica's status is known
            await asyncio.wait_for(client.reader.read(1), 0.3)
        gate.set()
        assert (await client.answer()).body == b"".join([*comments, *events, DONE_EVENT])
        rig.replica.default = [Send(stream(*comments, *events))]
        text = ""
        async with _sdk(rig) as sdk:
            async for one in await sdk.chat.completions.create(model="m", messages=MESSAGES, stream=True):
                text += one.choices[0].delta.content or ""
        assert text == "ab"

    with_rig(scenario)


MATRIX: dict[str, dict[str, Any]] = {
    "plain": {},
    "n": {"n": 2},
    "logprobs": {"logprobs": True, "top_logprobs": 3},
    "usage": {"stream_options": {"include_usage": True}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "stream after a long prompt": {"user": "x" * 200_000},
}


@pytest.mark.parametrize("tried_before", [False, True])
@pytest.mark.parametrize("cell", list(MATRIX))
def test_B076_each_event_is_passed_on_before_the_next_is_sent(cell: str, tried_before: bool) -> None:
    """Also when another replica was tried first, and its error answer kept meanwhile."""

    async def scenario(rig: Rig) -> None:
        gates = [asyncio.Event() for _ in range(4)]
        steps: list[Step] = [Send(STREAM_HEAD)]
        for index, gate in enumerate(gates):
            steps += [Wait(gate), Send(chunk(delta(f"t{index}")))]
        answers = [*steps, Send(chunk(DONE_EVENT) + LAST_CHUNK)]
        rig.replicas[0].default = [Send(sized(b"{}", 503, "No"))] if tried_before else answers
        rig.replicas[1].default = answers
        client = await rig.client()
        await client.post({**CHAT_STREAM, **MATRIX[cell]})
        assert (await client.head()).status == 200
        for index, gate in enumerate(gates):
            gate.set()
            assert await client.chunk() == delta(f"t{index}")
        assert await client.chunk() == DONE_EVENT
        assert rig.counters.retries == tried_before

    with_rig(scenario, replicas=2)


def test_B098_the_synchronous_sdk_raises_and_a_raw_parser_finds_the_error() -> None:
    openai = pytest.importorskip("openai")

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Reset()]
        raw = sse_events((await rig.ask(CHAT_STREAM)).body)
        assert set(raw[-1]) == {"error"}
        assert set(raw[-1]["error"]) == {"message", "type", "code", "param"}

        def read_all() -> None:
            client = openai.OpenAI(base_url=f"http://{rig.plane.address}/v1", api_key="k", max_retries=0)
            with client, pytest.raises(openai.APIError, match="broke off"):
                list(client.chat.completions.create(model="m", messages=MESSAGES, stream=True))

        await asyncio.to_thread(read_all)

    with_rig(scenario)


def test_B100_an_event_of_several_data_lines_is_one_event() -> None:
    """Allowed by the standard, sent by few: bytes unchanged, usage counted as in the usual framing."""
    usage = json.loads(usage_event(9, 2, 3)[6:])
    lines = json.dumps(usage, indent=1).split("\n")
    several = b"".join(f"data: {line}\n".encode() for line in lines) + b"\n"

    async def scenario(rig: Rig) -> None:
        events = [b": a comment\n\n", delta("a"), delta("b", finish="stop"), several]
        rig.replica.plans.append([Send(stream(*events))])
        answer = await rig.ask(CHAT_STREAM)
        assert answer.body == b"".join([*events, DONE_EVENT])
        counters = rig.counters
        assert (counters.prompt_tokens, counters.output_tokens, counters.cached_tokens) == (9, 2, 3)
        assert sum(counters.ttft_s.counts) == 1

    with_rig(scenario)


def test_B100_twenty_events_in_one_write_are_twenty_events() -> None:
    async def scenario(rig: Rig) -> None:
        events = [delta(f"t{index}") for index in range(20)]
        rig.replica.plans.append(
            [Send(STREAM_HEAD + chunk(b"".join(events)) + chunk(DONE_EVENT) + LAST_CHUNK)]
        )
        answer = await rig.ask(CHAT_STREAM)
        assert sse_events(answer.body)[:-1] == [json.loads(one[6:]) for one in events]
        rig.replica.plans.append([Send(sized(completion()))])
        assert (await rig.ask(CHAT)).body == completion()

    with_rig(scenario)


def test_B060_a_role_and_a_reset_are_no_answer() -> None:
    async def scenario(rig: Rig) -> None:
        role = delta("", role="assistant")
        rig.replica.plans.append([Send(STREAM_HEAD + chunk(role)), Reset()])
        answer = await rig.ask(CHAT_STREAM)
        first, last = sse_events(answer.body)
        assert first == json.loads(role[6:])
        assert set(last) == {"error"}
        assert not answer.whole

    with_rig(scenario)


def test_B073_fifty_stalled_clients_do_not_slow_a_stream_beside_them() -> None:
    """Each takes nothing of an endless answer: their replica waits, the stream beside them goes on."""
    piece = chunk(event({"x": "y" * 200_000}))

    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Send(STREAM_HEAD), *(Send(piece) for _ in range(200)), Hang()]
        rig.drain(1)
        for _ in range(50):
            await (await rig.client(read_ahead=1)).post(CHAT_STREAM)
        await until(lambda: rig.replicas[0].answering == 50)
        rig.drain(1, on=False)
        rig.drain(0)
        tokens = [chunk(delta(str(index))) for index in range(100)]
        rig.replicas[1].default = [
            Send(STREAM_HEAD),
            *(Send(token) for token in tokens),
            Send(chunk(DONE_EVENT) + LAST_CHUNK),
        ]
        answer = await rig.ask(CHAT_STREAM)
        assert answer.whole and len(sse_events(answer.body)) == 101
        assert rig.counters.in_flight == 50  # all still stalled
        assert rig.replicas[0].sent_bytes < 50 * 100 * len(piece)

    with_rig(scenario, replicas=2)
