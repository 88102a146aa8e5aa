"""Clients that leave, at any time: the replica is told at once, and nothing stays booked."""

import asyncio
import logging
import random
from typing import Any

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Hang,
    Send,
    Wait,
    chunk,
    completion,
    delta,
    head,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig
from tests.fakes.raw_client import RawClient


def _fin(client: RawClient) -> None:
    client.writer.close()


def _rst(client: RawClient) -> None:
    client.leave()


def _half(client: RawClient) -> None:
    client.writer.write_eof()


LEAVE = {"fin": _fin, "rst": _rst, "half": _half}


@pytest.mark.parametrize("how", list(LEAVE))
@pytest.mark.parametrize("body", [CHAT, CHAT_STREAM])
def test_B033_left_before_the_first_byte(how: str, body: dict[str, Any]) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        client = await rig.client()
        await client.post(body)
        await until(lambda: rig.replica.answering == 1)
        assert rig.booked()["queued"] == 1
        LEAVE[how](client)
        await until(lambda: rig.replica.aborted == 1)
        assert not any(rig.booked().values())
        assert rig.counters.client_disconnects == 1
        assert rig.counters.requests == {("r0", 499): 1}
        assert rig.counters.errors == {}

    with_rig(scenario)


@pytest.mark.parametrize("how", list(LEAVE))
def test_B141_left_in_the_stream(how: str) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
        client = await rig.client()
        await client.post(CHAT_STREAM)
        await client.head()
        assert await client.chunk() == delta("a")
        assert rig.booked()["decoding"] == 1
        LEAVE[how](client)
        await until(lambda: rig.replica.aborted == 1)
        assert rig.counters.requests == {("r0", 499): 1}

    with_rig(scenario)


def test_left_in_a_json_body() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [
            Send(head(content_type="application/json", content_length="99") + b"{"),
            Hang(),
        ]
        client = await rig.client()
        await client.post(CHAT)
        await client.head()
        client.leave()
        await until(lambda: rig.replica.aborted == 1)

    with_rig(scenario)


def test_left_while_the_connection_is_being_made() -> None:
    """A replica that accepts nobody: the attempt is given up with its client."""

    async def scenario(rig: Rig) -> None:
        for _ in range(20):
            client = await rig.client()
            await client.post(CHAT)
            client.leave()
        await until(lambda: rig.counters.open_client_connections == 0)
        await until(lambda: rig.counters.in_flight == 0)

    with_rig(scenario)


def test_left_while_another_replica_is_tried() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Send(head(503, "Busy", content_length="50")), Hang()]
        rig.replicas[1].default = [Hang()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: rig.replicas[1].answering == 1)
        assert rig.replicas[0].answering == 1  # its answer is kept
        client.leave()
        await until(lambda: rig.replicas[0].aborted == 1 and rig.replicas[1].aborted == 1)

    with_rig(scenario, replicas=2)


def test_left_while_sending() -> None:
    async def scenario(rig: Rig) -> None:
        for part in (
            b"POST",
            b"POST /v1/x HTTP/1.1\r\nHo",
            b"POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\n{",
        ):
            client = await rig.client()
            await client.send(part)
            await until(lambda: rig.counters.open_client_connections == 1)
            client.leave()
            await until(lambda: rig.counters.open_client_connections == 0)
        assert not rig.replica.requests

    with_rig(scenario)


def test_left_with_requests_waiting_behind() -> None:
    """The client pipelined more, so its leaving is behind bytes the router has read ahead."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        client = await rig.client()
        for _ in range(3):
            await client.post(CHAT)
        await until(lambda: rig.replica.answering == 1)
        client.leave()
        await until(lambda: rig.replica.aborted == 1)
        assert len(rig.replica.requests) == 1

    with_rig(scenario)


def test_left_with_more_waiting_than_is_read_ahead() -> None:
    """Reading is paused by then; the router asks the kernel instead."""

    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Hang()]
        client = await rig.client()
        for _ in range(10):
            await client.post(b'{"a":"%b"}' % (b"x" * 100_000))
        await until(lambda: rig.replica.answering == 1)
        _fin(client)
        await until(lambda: rig.replica.aborted == 1)

    with_rig(scenario, timeouts={"client_stall_s": 0.5})


def test_B014_nothing_leaks_over_many_departures() -> None:
    async def scenario(rig: Rig) -> None:
        chance = random.Random(7)

        def plan(request: object) -> list[Any]:
            gate = asyncio.Event()
            asyncio.get_running_loop().call_later(chance.random() * 0.01, gate.set)
            events = [Send(chunk(delta("a"))) for _ in range(5)]
            return [Wait(gate), Send(STREAM_HEAD), *events, Send(chunk(DONE_EVENT) + LAST_CHUNK)]

        for replica in rig.replicas:
            replica.default = plan

        async def one() -> None:
            client = await rig.client()
            await client.post(CHAT_STREAM)
            for _ in range(chance.randrange(12)):
                await asyncio.sleep(0.001)
            client.leave()

        for _ in range(10):
            await asyncio.gather(*(one() for _ in range(30)))
        await until(lambda: not any(rig.booked().values()))
        for replica in rig.replicas:
            replica.default = [Send(sized(completion()))]
        for _ in range(4):
            assert (await rig.ask(CHAT)).status == 200
        total = sum(rig.counters.requests.values())
        assert total <= 304  # each request ended once; those that left before they were read never began

    with_rig(scenario, replicas=2)


def test_B147_departures_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(STREAM_HEAD + chunk(delta("a"))), Hang()]
        for _ in range(20):
            client = await rig.client()
            await client.post(CHAT_STREAM)
            await client.head()
            client.leave()
        await until(lambda: rig.replica.aborted == 20)

    with caplog.at_level(logging.INFO):
        with_rig(scenario)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.INFO] == []
