"""Bug cases of the category cancellation that no test beside the proxy's own proves."""

import asyncio
import json
import logging
from typing import Any

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    STREAM_HEAD,
    Hang,
    Send,
    Wait,
    chunk,
    delta,
    sized,
    stream,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig

HELD = {"kind": "predicted_finish"}


def _long(word: str) -> dict[str, Any]:
    """A streamed chat that is too long to share an engine's step, and like no other."""
    return {**CHAT_STREAM, "messages": [{"role": "user", "content": word * 100_000}]}


def test_B102_a_request_whose_client_left_the_queue_is_never_sent() -> None:
    """A runs, B and C wait in the router; B leaves: C follows A at once and B reaches nobody."""

    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Wait(gate), Send(stream(delta("a"), delta(None, finish="stop")))])
        first, leaving, last = [await rig.client() for _ in range(3)]
        await first.post(_long("a"))
        await until(lambda: rig.replica.answering == 1)
        await leaving.post(_long("b"))
        await until(lambda: rig.fleet.held == 1)
        await last.post(_long("c"))
        await until(lambda: rig.fleet.held == 2)
        leaving.leave()
        await until(lambda: rig.fleet.held == 1)  # its place is free at once
        assert rig.counters.requests == {("", 499): 1}
        assert len(rig.replica.requests) == 1
        gate.set()
        assert (await first.answer()).whole
        assert (await last.answer()).whole
        sent = [json.loads(request.body)["messages"][0]["content"][0] for request in rig.replica.requests]
        assert sent == ["a", "c"]
        assert rig.fleet.held == 0

    with_rig(scenario, policy=HELD)


def test_B102_everybody_in_the_queue_leaves_and_nobody_is_sent() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.plans.append([Wait(gate), Send(stream(delta("a"), delta(None, finish="stop")))])
        first = await rig.client()
        await first.post(_long("a"))
        await until(lambda: rig.replica.answering == 1)
        waiting = [await rig.client() for _ in range(20)]
        for index, client in enumerate(waiting):
            await client.post(_long(chr(ord("b") + index)))
        await until(lambda: rig.fleet.held == 20)
        for client in waiting:
            client.leave()
        gate.set()
        assert (await first.answer()).whole
        await until(lambda: not any(rig.booked().values()))
        assert len(rig.replica.requests) == 1
        assert (await rig.ask(CHAT)).status == 200

    with_rig(scenario, policy=HELD)


def test_B014_four_slots_are_whole_after_hundreds_of_cut_streams() -> None:
    """Cut while held, in the header wait, in the stream and at its end; then requests are served at once."""

    async def scenario(rig: Rig) -> None:
        whole = [chunk(delta(str(index))) for index in range(3)]
        rig.replica.default = [
            Send(STREAM_HEAD),
            *(Send(one) for one in whole),
            Send(chunk(DONE_EVENT)),
            Hang(),
        ]
        for turn in range(250):
            client = await rig.client()
            await client.post(CHAT_STREAM if turn % 2 else _long("x"))
            if turn % 5:
                await client.head()
            for _ in range(turn % 5 - 1):
                await client.chunk()
            client.leave()
        await until(lambda: not any(rig.booked().values()))
        rig.replica.default = [Send(sized(b"{}"))]
        for _ in range(4):
            assert (await rig.ask(CHAT)).status == 200
        assert rig.counters.errors == {}

    with_rig(scenario, policy=HELD)


def test_B147_a_thousand_departures_leave_no_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """Before the answer, in it, and in a pipelined request; counted instead (499)."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]

        async def leave(turn: int) -> None:
            client = await rig.client()
            await client.post(CHAT_STREAM)
            if turn % 3:
                await client.head()
            if turn % 3 == 2:
                await client.post(CHAT_STREAM)
            await until(lambda: rig.replica.answering > 0)
            client.leave()

        for start in range(0, 1_000, 50):
            await asyncio.gather(*(leave(start + turn) for turn in range(50)))
        await until(lambda: not any(rig.booked().values()))
        left = sum(count for (_, status), count in rig.counters.requests.items() if status == 499)
        assert 900 <= left <= 1_000  # a reset may overtake a request that was never read

    with caplog.at_level(logging.INFO):
        with_rig(scenario)
    assert [record.getMessage() for record in caplog.records] == []
