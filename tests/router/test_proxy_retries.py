"""Failures before the first byte: tried elsewhere, within a budget; what replicas say is never disguised."""

import asyncio
import gc
from typing import Any

import pytest

from router.proxy.attempt import Attempt
from router.proxy.exchange import Exchange
from router.proxy.tries import Tries
from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    Close,
    Hang,
    Reset,
    Send,
    Wait,
    completion,
    head,
    sized,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, Rig, until, with_rig

ERROR = b'{"error": {"message": "no \xc3\xa9", "type": "x", "code": 1, "param": null}}  '


def _seen(rig: Rig) -> int:
    return sum(len(replica.requests) for replica in rig.replicas)


@pytest.mark.parametrize("body", [CHAT, CHAT_STREAM])
@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 422, 500, 501, 503])
def test_B003_B036_a_refusal_keeps_its_status_and_body(status: int, body: dict[str, Any]) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Send(sized(ERROR, status, "Because", x_own="1"))]
        answer = await rig.ask(body)
        assert (answer.status, answer.reason) == (status, "Because")
        assert answer.body == ERROR
        assert answer.whole
        assert answer.field("content-type") == "application/json"
        assert answer.field("x-own") == "1"
        assert len(rig.replica.requests) == 1

    with_rig(scenario)


@pytest.mark.parametrize("status", [400, 404, 422])
def test_B097_4xx_is_neither_tried_again_nor_held_against_the_replica(status: int) -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Send(sized(ERROR, status, "No"))]
        for _ in range(5):
            assert (await rig.ask(CHAT)).status == status
        assert _seen(rig) == 5
        assert all(replica.health.state is HealthState.HEALTHY for replica in rig.fleet.replicas)

    with_rig(scenario, replicas=2)


@pytest.mark.parametrize("status", [429, 503])
def test_B039_busy_everywhere_is_passed_on_with_retry_after(status: int) -> None:
    async def scenario(rig: Rig) -> None:
        for index, replica in enumerate(rig.replicas):
            replica.default = [Send(sized(ERROR, status, "Busy", retry_after=str(7 + index)))]
        answer = await rig.ask(CHAT_STREAM)
        assert answer.status == status
        assert answer.field("retry-after") in ("7", "8", "9")
        assert answer.body == ERROR
        assert _seen(rig) == 3
        assert all(replica.health.state is HealthState.HEALTHY for replica in rig.fleet.replicas)
        for replica in rig.replicas:
            replica.default = [Send(sized(completion()))]
        assert (await rig.ask(CHAT)).status == 200  # nobody was taken out

    with_rig(scenario, replicas=3)


FAILURES: dict[str, list[Any]] = {
    "closed": [Close()],
    "reset": [Reset()],
    "half a head": [Send(b"HTTP/1.1 200 OK\r\nContent-"), Close()],
    "500": [Send(sized(ERROR, 500, "No"))],
    "502": [Send(sized(ERROR, 502, "No"))],
    "503": [Send(sized(ERROR, 503, "No"))],
    "504 without a length": [Send(head(504, "No") + ERROR), Close()],
    "503 busy": [Send(sized(ERROR, 503, "No", retry_after="1"))],
    "429": [Send(sized(ERROR, 429, "No"))],
    "garbage": [Send(b"\x00\x01\x02 what is this\r\n\r\n")],
    "not a status": [Send(b"HTTP/1.1 2x0 OK\r\n\r\n")],
    "two lengths": [Send(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}")],
    "length and chunks": [Send(head(content_length="2", transfer_encoding="chunked") + b"{}")],
    "folded header": [Send(b"HTTP/1.1 200 OK\r\nA: b\r\n c\r\nContent-Length: 2\r\n\r\n{}")],
    "lines ended by LF alone": [Send(b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}"), Hang()],
    "a length of thousands of digits": [Send(head(content_length="0" * 5000 + "2") + b"{}")],
    "an upgrade": [Send(b"HTTP/1.1 101 Go\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n")],
}


@pytest.mark.parametrize("policy", ["round_robin", "predicted_finish"])
@pytest.mark.parametrize("status", [429, 503])
def test_B039_a_busy_replica_is_left_alone_as_long_as_it_wants(status: int, policy: str) -> None:
    """A replica that turns everybody away at once has the shortest queue: it must not get them all."""

    async def scenario(rig: Rig) -> None:
        busy = [Send(sized(b"{}", status, "Busy", retry_after="20"))]
        rig.replica.default = busy
        for number in range(200):
            assert (await rig.ask({**CHAT, "user": str(number)})).status == 200
        assert len(rig.replica.requests) == 1 and rig.counters.retries == 1
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY
        rig.replicas[1].default = busy
        assert (await rig.ask(CHAT)).status == status  # nobody else is left: both are asked again
        assert len(rig.replica.requests) == 2

    with_rig(scenario, replicas=2, policy={"kind": policy})


@pytest.mark.parametrize("name", list(FAILURES))
def test_B040_tried_on_another_replica(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = FAILURES[name]
        answer = await rig.ask(CHAT_STREAM)
        assert answer.status == 200
        assert len(rig.replicas[0].requests) == 1
        assert len(rig.replicas[1].requests) == 1
        assert rig.counters.retries == 1
        assert rig.counters.decisions["r1", "retry"] == 1

    with_rig(scenario, replicas=2)


@pytest.mark.parametrize("name", list(FAILURES))
def test_every_replica_fails_and_the_last_one_is_told(name: str) -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = FAILURES[name]
        answer = await rig.ask(CHAT)
        assert _seen(rig) == 3  # attempts: 3
        if name[:3].isdigit():
            assert answer.status == int(name[:3])
            assert answer.body == ERROR
        else:
            assert answer.status == 502
            assert answer.error["code"] in ("replica_closed", "replica_garbage")

    with_rig(scenario, replicas=4)


def test_an_error_answer_is_kept_while_another_replica_is_tried() -> None:
    """The second replica dies without a word: the client gets the first one's real answer."""

    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Send(sized(ERROR * 1000, 503, "Real"))]
        rig.replicas[1].default = [Reset()]
        answer = await rig.ask(CHAT)
        assert (answer.status, answer.reason, answer.body) == (503, "Real", ERROR * 1000)
        assert answer.whole

    with_rig(scenario, replicas=2)


def test_a_kept_error_answer_that_breaks_is_not_whole() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replicas[0].default = [Send(head(500, "Real", content_length="99") + b"part"), Reset()]
        rig.replicas[1].default = [Wait(gate), Reset()]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: rig.replicas[1].answering == 1 and not rig.replicas[0].open_connections)
        gate.set()
        answer = await client.answer()
        assert (answer.status, answer.whole) == (500, False)

    with_rig(scenario, replicas=2)


def test_nobody_listens() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            await replica.kill()
        answer = await rig.ask(CHAT)
        assert answer.status == 502
        assert answer.error["code"] == "replica_unreachable"
        assert str(rig.replica.port) not in answer.body.decode()
        assert all(replica.health.state is HealthState.EJECTED for replica in rig.fleet.replicas)
        await rig.replicas[1].start()
        assert (await rig.ask(CHAT)).status == 200  # panic: tried all the same

    with_rig(scenario, replicas=2)


def test_when_all_are_ejected_and_one_refuses_another_is_tried() -> None:
    """Probes fail on two that serve well; the third is gone."""

    async def scenario(rig: Rig) -> None:
        await rig.replica.kill()
        for index in range(3):
            rig.fleet.probe_failed(index, 0.0, refused=True)
        assert [(await rig.ask(CHAT)).status for _ in range(6)] == [200] * 6
        assert {reason for _, reason in rig.counters.decisions} == {"panic", "retry"}

    with_rig(scenario, replicas=3)


def test_one_that_is_ejected_gets_no_retry_while_another_is_not() -> None:
    async def scenario(rig: Rig) -> None:
        rig.fleet.probe_failed(1, 0.0, refused=True)
        rig.replica.default = [Send(sized(b"{}", 500, "No"))]
        assert (await rig.ask(CHAT)).status == 500
        assert not rig.replicas[1].requests

    with_rig(scenario, replicas=2)


def test_B125_when_all_are_ejected_requests_are_tried_all_the_same() -> None:
    async def scenario(rig: Rig) -> None:
        for index in range(2):
            rig.fleet.probe_failed(index, 0.0, refused=True)
        answer = await rig.ask(CHAT)
        assert answer.status == 200
        assert {reason for _, reason in rig.counters.decisions} == {"panic"}

    with_rig(scenario, replicas=2)


def test_all_draining_is_an_explicit_503() -> None:
    async def scenario(rig: Rig) -> None:
        rig.fleet.drained(0, 0.0)
        answer = await rig.ask(CHAT)
        assert answer.status == 503
        assert answer.error["code"] == "no_replica"
        assert answer.field("retry-after") == "1"
        assert not rig.replica.requests

    with_rig(scenario)


def test_unknown_model_is_404() -> None:
    async def scenario(rig: Rig) -> None:
        answer = await rig.ask({**CHAT, "model": "other"})
        assert answer.status == 404
        assert answer.error["code"] == "model_not_found"
        assert answer.error["type"] == "invalid_request_error"
        assert not rig.replica.requests

    with_rig(scenario, model="m")


def test_fifty_waiting_requests_survive_the_death_of_their_replica() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        for replica in rig.replicas:
            replica.default = [Wait(gate), Send(sized(completion()))]
        asks = [asyncio.create_task(rig.ask(CHAT)) for _ in range(50)]
        await until(lambda: sum(replica.answering for replica in rig.replicas) == 50)
        assert rig.replicas[0].answering >= 16
        await rig.replicas[0].kill()
        await until(lambda: sum(replica.answering for replica in rig.replicas) == 50)
        gate.set()
        answers = await asyncio.gather(*asks)
        assert [answer.status for answer in answers] == [200] * 50
        assert all(answer.body == completion() for answer in answers)

    with_rig(scenario, replicas=3)


def test_fifty_waiting_requests_on_reused_connections_survive_it_too() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        clients = [await rig.client() for _ in range(50)]
        for replica in rig.replicas:
            replica.default = [Send(sized(completion()))]
        for client in clients:
            await client.post(CHAT)
        for client in clients:
            assert (await client.answer()).status == 200
        for replica in rig.replicas:
            replica.default = [Wait(gate), Send(sized(completion()))]
        for client in clients:
            await client.post(CHAT)
        await until(lambda: sum(replica.answering for replica in rig.replicas) == 50)
        await rig.replicas[0].kill()
        await until(lambda: sum(replica.answering for replica in rig.replicas) == 50)
        gate.set()
        for client in clients:
            assert (await client.answer()).status == 200

    with_rig(scenario, replicas=3)


@pytest.mark.parametrize("first", [Send(sized(completion())), Send(sized(ERROR, 503)), Reset()])
def test_a_request_that_is_over_is_no_work_for_the_garbage_collector(first: Send | Reset) -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [first]
        gc.collect()
        gc.disable()
        try:
            for _ in range(4):
                assert (await rig.ask(CHAT)).status == 200
            kept = [one for one in gc.get_objects() if type(one) in (Exchange, Tries, Attempt)]
        finally:
            gc.enable()
        assert not kept

    with_rig(scenario, replicas=2)


def test_the_budget_ends_retries_in_a_brown_out() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Send(sized(ERROR, 500, "No"))]
        for _ in range(20):
            assert (await rig.ask(CHAT)).status == 500
        # Two in hand, then one for every fourth request: the 1st, 2nd, 5th, 9th, 13th and 17th.
        assert rig.counters.retries == 6
        assert _seen(rig) == 26

    with_rig(
        scenario,
        replicas=2,
        retries={"budget_floor": 2, "budget_share": 0.25},
        health={"failures_to_eject": 1000},
    )


def test_one_attempt_means_no_retry() -> None:
    async def scenario(rig: Rig) -> None:
        for replica in rig.replicas:
            replica.default = [Reset()]
        assert (await rig.ask(CHAT)).status == 502
        assert _seen(rig) == 1

    with_rig(scenario, replicas=3, retries={"attempts": 1})
