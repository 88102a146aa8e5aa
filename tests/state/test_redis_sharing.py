"""Routers that share through a real Redis: what one does the others know, and nothing stays for ever."""

import asyncio
import time

import pytest

from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from tests.fakes.redis_server import RedisServer, needs_redis
from tests.fakes.slow_link import slow_link
from tests.router.small_fleet import prefilled
from tests.state.members import Member, Members, prompt, until, with_redis

pytestmark = needs_redis


def test_what_one_sends_is_in_the_others_ledger_until_it_is_over() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        flights = [one.send(name) for name in range(10)]
        await until(lambda: two.in_flight() == one.in_flight())
        assert sum(two.in_flight()) == 10 and two.report.peers[0].outstanding == 10
        assert all(two.knows(name) for name in range(10))
        one.fleet.first_token(flights[0], time.monotonic())
        await until(lambda: sum(replica.ledger.decoding for replica in two.fleet.replicas) == 1)
        for flight in flights:
            one.end(flight)
        await until(lambda: sum(two.in_flight()) == 0)
        assert one.report.gaps == two.report.gaps == 0
        assert one.report.lag_ms is not None and one.report.lag_ms < 1_000.0

    with_redis(scenario)


def test_three_routers_and_their_ledgers_end_at_zero() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        three = [await members.start() for _ in range(3)]
        await until(lambda: all(len(member.report.peers) == 2 for member in three))
        flights: list[tuple[Member, InFlight]] = []
        for number in range(300):
            member = three[number % 3]
            flights.append((member, member.send(number % 40)))
            if number % 2:
                owner, flight = flights.pop(0)
                owner.end(flight)
            if number % 10 == 0:
                await asyncio.sleep(0.001)
        await until(lambda: len({tuple(member.in_flight()) for member in three}) == 1)
        assert sum(three[0].in_flight()) == 150
        for owner, flight in flights:
            owner.end(flight)
        await until(lambda: not any(sum(member.in_flight()) for member in three))
        assert not any(replica.ledger.outstanding_tokens for m in three for replica in m.fleet.replicas)

    with_redis(scenario)


def test_a_router_that_stops_leaves_nothing_at_once() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        one.send(1)
        await until(lambda: sum(two.in_flight()) == 1)
        await one.state.stop()
        await until(lambda: sum(two.in_flight()) == 0)

    with_redis(scenario, lease_s=60.0)


def test_B118_a_router_that_starts_is_warm() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        for name in range(500):
            one.end(one.send(name))
        one.fleet.drained(0, time.monotonic())
        running = one.send(9_999)
        await until(lambda: two.knows(499))
        three = await members.start()
        assert await three.warmed_from() in (one.report.router, two.report.router)
        assert all(three.knows(name) for name in range(500))
        await until(lambda: three.fleet.replicas[0].draining and sum(three.in_flight()) == 1)
        one.end(running)

    with_redis(scenario)


def test_a_router_that_starts_before_redis_is_warm_soon_after_it() -> None:
    """The others tell again what they sent lately, not all they know: that has to be asked for."""

    async def scenario(server: RedisServer, members: Members) -> None:
        one = await members.start()
        for name in range(20):
            one.end(one.send(name))
        await until(lambda: one.report.state == "sharing")
        await server.kill()
        two = await members.start()
        assert two.report.state == "cut_off" and not two.knows(1)
        await server.start()
        assert await two.warmed_from() == one.report.router
        assert all(two.knows(name) for name in range(20))

    with_redis(scenario)


def test_learned_speeds_go_with_the_rest() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one = await members.start()
        cost = one.fleet.replicas[1].cost
        for second in range(60):
            prefilled(cost, second, second + 0.5, 1_000)
        two = await members.start()
        await two.warmed_from()
        assert two.fleet.replicas[1].cost.prefill_factor == pytest.approx(cost.prefill_factor, rel=1e-3)
        assert two.fleet.speed.prefill_factor == pytest.approx(one.fleet.speed.prefill_factor, rel=1e-3)

    with_redis(scenario)


def test_a_gap_is_found_and_made_good() -> None:
    """The stream is emptied before a router far away has read it: only the numbers tell."""

    async def scenario(server: RedisServer, members: Members) -> None:
        async with slow_link(server.port, 0.05) as link:
            one = await members.start()
            two = await members.start(url=f"redis://127.0.0.1:{link.port}")
            await until(lambda: bool(one.report.peers and two.report.peers))
            prompts = range(50)
            for name in prompts:
                one.end(one.send(name))
                await asyncio.sleep(0.005)
                await server.ask("XTRIM", "warmroute:news", "MAXLEN", 0)
            kept = one.send(100)
            await until(lambda: two.in_flight() == one.in_flight() and sum(two.in_flight()) == 1)
            assert two.report.gaps
            await until(lambda: all(two.knows(name) for name in prompts))
            one.end(kept)
            await until(lambda: sum(two.in_flight()) == 0)
            await members.stop()

    with_redis(scenario, lease_s=5.0)


def test_fleets_in_one_redis_do_not_meet() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        stranger = await members.start(namespace="another")
        one.send(1)
        await until(lambda: sum(two.in_flight()) == 1)
        assert not stranger.report.peers and sum(stranger.in_flight()) == 0

    with_redis(scenario)


def test_held_requests_of_all_routers_are_one_queue() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.start(hold=True), await members.start(hold=True)
        await until(lambda: all(m.report.state == "sharing" and m.report.peers for m in (one, two)))
        running = [one.send(name, 300) for name in range(2)]
        await until(lambda: two.in_flight() == [1, 1])
        held = two.fleet.submit(prompt(50, 100), time.monotonic())
        assert isinstance(held, Held)
        replica = held.decision.replica
        await until(lambda: len(one.fleet.replicas[replica].held) == 1)
        flight = next(flight for flight in running if flight.replica.index == replica)
        one.fleet.first_token(flight, time.monotonic())
        await until(lambda: two.released == [held])

    with_redis(scenario)


def test_news_of_another_version_is_counted_and_left() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        for junk in ("", "\x01rest", "\x02\x93junk"):
            await server.ask("XADD", "warmroute:news", "*", "b", junk)
        await server.ask("XADD", "warmroute:news", "*", "other", "field")
        await until(lambda: two.report.malformed == 4)
        flight = one.send(1)
        await until(lambda: sum(two.in_flight()) == 1)
        one.end(flight)

    with_redis(scenario)
