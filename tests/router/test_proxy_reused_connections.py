"""Connections to replicas that are used again: when a close is no failure, and when they are closed."""

import asyncio

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    Close,
    FakeReplica,
    Hang,
    Reset,
    Send,
    Wait,
    completion,
    sized,
)
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig


def test_keep_alive_race_is_not_a_failure() -> None:
    """The replica closes idle connections without a word: requests go again on a fresh one."""

    async def scenario(rig: Rig) -> None:
        rig.replica.plans.append([Send(sized(completion()))])
        client = await rig.client()
        await client.post(CHAT)
        assert (await client.answer()).status == 200
        # The connection is idle in the pool. The replica takes the next request on it and closes.
        rig.replica.plans.append([Close()])
        await client.post(CHAT)
        assert (await client.answer()).status == 200
        assert rig.replica.connections == 2
        assert len(rig.replica.requests) == 3
        assert rig.counters.retries == 0
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY

    with_rig(scenario)


def test_a_fresh_connection_that_closes_is_a_failure() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replica.default = [Close()]
        assert (await rig.ask(CHAT)).error["code"] == "replica_closed"
        assert len(rig.replica.requests) == 1
        assert rig.fleet.replicas[0].health.state is HealthState.SUSPECT

    with_rig(scenario)


def test_a_reused_connection_is_given_one_more_chance_only() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.post(CHAT)
        assert (await client.answer()).status == 200
        rig.replica.default = [Reset()]
        await client.post(CHAT)
        assert (await client.answer()).error["code"] == "replica_closed"
        assert (
            len(rig.replica.requests) == 3
        )  # one that worked, one on the old connection, one on a fresh one

    with_rig(scenario)


def test_half_an_answer_on_a_reused_connection_is_not_sent_again_there() -> None:
    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.post(CHAT)
        await client.answer()
        rig.replica.default = [Send(b"HTTP/1.1 200"), Close()]
        await client.post(CHAT)
        assert (await client.answer()).error["code"] == "replica_closed"
        assert len(rig.replica.requests) == 2

    with_rig(scenario)


def test_a_replica_that_said_continue_has_seen_the_request() -> None:
    """It is no longer the idle connection that closed: the request goes to another replica or fails."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.post(CHAT)
        await client.answer()
        rig.replica.default = [Send(b"HTTP/1.1 100 Continue\r\n\r\n"), Close()]
        await client.post(CHAT)
        assert (await client.answer()).error["code"] == "replica_closed"
        assert len(rig.replica.requests) == 2

    with_rig(scenario)


def test_idle_connections_are_closed_before_the_replica_would() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask(CHAT)
        assert rig.counters.open_replica_connections == 1
        await until(lambda: rig.counters.open_replica_connections == 0)
        await until(lambda: rig.replica.open_connections == 0)

    with_rig(scenario, timeouts={"replica_keepalive_s": 0.05})


def test_a_connection_idle_too_long_is_not_used_even_before_the_sweep() -> None:
    async def scenario(rig: Rig) -> None:
        await rig.ask(CHAT)
        service = rig.plane.service
        real = service.clock
        service.clock = lambda: real() + 4.5
        await rig.ask(CHAT)
        assert rig.replica.connections == 2

    with_rig(scenario, timeouts={"replica_keepalive_s": 4.0})


def test_B019_as_many_connections_as_requests() -> None:
    async def scenario(rig: Rig) -> None:
        gate = asyncio.Event()
        rig.replica.default = [Wait(gate), Send(sized(completion()))]
        asks = [asyncio.create_task(rig.ask(CHAT)) for _ in range(150)]
        await until(lambda: rig.replica.answering == 150)
        gate.set()
        assert {answer.status for answer in await asyncio.gather(*asks)} == {200}
        before = rig.replica.connections
        for _ in range(10):
            await rig.ask(CHAT)
        assert rig.replica.connections == before == 150  # reused

    with_rig(scenario)


def test_a_hanging_replica_does_not_touch_the_others() -> None:
    async def scenario(rig: Rig) -> None:
        rig.replicas[0].default = [Hang()]
        hanging: list[FakeReplica] = [rig.replicas[0]]
        client = await rig.client()
        await client.post(CHAT)
        await until(lambda: hanging[0].answering == 1)
        for _ in range(5):
            rig.fleet.drained(0, 0.0)
            assert (await rig.ask(CHAT)).status == 200

    with_rig(scenario, replicas=2)
