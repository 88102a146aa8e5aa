"""A Redis that answers late, or after nobody waits any more: bounded connections, no mixed-up replies."""

import asyncio
import random
import time

import pytest

from router.routing.in_flight import InFlight
from tests.fakes.redis_server import RedisServer, needs_redis
from tests.fakes.slow_link import slow_link
from tests.state.members import MOST_CONNECTIONS, QUICK, Member, Members, connections, until, with_redis

pytestmark = needs_redis


def test_B119_replies_that_come_after_their_time_meet_nobody() -> None:
    """Every command times out and is answered later; afterwards everything that is read makes sense."""

    async def scenario(server: RedisServer, members: Members) -> None:
        async with slow_link(server.port) as link:
            url = f"redis://127.0.0.1:{link.port}"
            one, two = await members.start(url=url), await members.start(url=url)
            await until(lambda: bool(two.report.peers and one.report.peers))
            for _ in range(3):
                link.delay_s = 0.5  # there and back: far beyond the limit
                flights = [one.send(number) for number in range(20)]
                await until(lambda: one.report.state == two.report.state == "cut_off")
                link.delay_s = 0.0
                await until(lambda: one.report.state == two.report.state == "sharing")
                await until(lambda: sum(two.in_flight()) == 20)
                for flight in flights:
                    one.end(flight)
                await until(lambda: sum(two.in_flight()) == 0)
            assert one.report.malformed == two.report.malformed == 0

    with_redis(scenario)


@pytest.mark.parametrize("delay_s", [0.1, 0.2], ids=["B119's 100 ms", "B014's 200 ms"])
def test_B014_B119_five_hundred_requests_cut_at_any_moment_are_told_of_exactly(delay_s: float) -> None:
    """Two routers at once; in the end each believes of the other what is open there, and then nothing."""

    async def scenario(server: RedisServer, members: Members) -> None:
        rng = random.Random(1)
        async with slow_link(server.port) as link:
            url = f"redis://127.0.0.1:{link.port}"
            one, two = await members.start(url=url), await members.start(url=url)
            await until(lambda: bool(two.report.peers and one.report.peers))
            link.delay_s = delay_s
            open_flights: dict[bool, list[InFlight]] = {True: [], False: []}
            for number in range(500):
                first = rng.random() < 0.5
                member, flights = (one if first else two), open_flights[first]
                flights.append(member.send(number))
                while flights and rng.random() < 0.5:
                    flight = flights.pop(rng.randrange(len(flights)))
                    match rng.randrange(4):
                        case 0:
                            member.end(flight)
                        case 1:
                            member.fleet.first_token(flight, time.monotonic())
                            member.fleet.cancelled(flight, time.monotonic())
                        case _:
                            member.fleet.cancelled(flight, time.monotonic())
                if number % 25 == 0:
                    await asyncio.sleep(0)  # some is on its way while the rest begins
            open_now = [flight.replica.index for flights in open_flights.values() for flight in flights]
            expected = [open_now.count(replica) for replica in range(len(one.in_flight()))]
            assert sum(expected) > 10
            await until(lambda: one.in_flight() == two.in_flight() == expected)
            for first, flights in open_flights.items():
                for flight in flights:
                    (one if first else two).end(flight)
            await until(lambda: sum(one.in_flight()) == sum(two.in_flight()) == 0)
            assert one.report.malformed == two.report.malformed == 0

    with_redis(scenario, timeout_ms=2_000.0, lease_s=5.0)


async def no_clients(server: RedisServer) -> None:
    """Wait until nobody is connected."""
    async with asyncio.timeout(5.0):
        while await connections(server):  # noqa: ASYNC110 - only the server knows
            await asyncio.sleep(0.02)


def test_B137_routers_cancelled_at_any_moment_of_their_start_leave_no_connection() -> None:
    """60 starts, each cut at a random moment of the 0.3 s that its connections and questions take.

    A few rounds of twenty at once are enough: what leaks, leaks in each that is cut at the wrong moment.
    """

    async def scenario(server: RedisServer, members: Members) -> None:
        rng = random.Random(1)
        cut = open_when_cut = 0
        async with slow_link(server.port, 0.05) as link:
            state = {"kind": "redis", "url": f"redis://127.0.0.1:{link.port}"} | QUICK

            async def start_and_cancel() -> None:
                nonlocal cut
                member = Member(state)
                starting = asyncio.create_task(member.state.start())
                await asyncio.wait([starting], timeout=rng.random() * 0.3)
                starting.cancel()
                await asyncio.wait([starting])
                cut += starting.cancelled()
                await member.state.stop()

            for _ in range(3):
                rounds = [asyncio.create_task(start_and_cancel()) for _ in range(20)]
                await asyncio.sleep(0.15)
                open_when_cut += await connections(server)
                await asyncio.gather(*rounds)
                await no_clients(server)
        assert cut > 30 and open_when_cut > 10, (cut, open_when_cut)

    with_redis(scenario)


def test_B137_two_thousand_cancelled_requests_watch_nothing_and_borrow_no_connection() -> None:
    """With 50 ms of latency: the request path holds no connection, so there is none it could lose."""

    async def scenario(server: RedisServer, members: Members) -> None:
        rng = random.Random(1)
        async with slow_link(server.port) as link:
            url = f"redis://127.0.0.1:{link.port}"
            one, two = await asyncio.gather(members.start(url=url), members.start(url=url))
            await until(lambda: bool(two.report.peers and one.report.peers))
            link.delay_s = 0.025  # there and back

            async def request(number: int) -> None:
                flight = one.send(number % 50)
                try:
                    await asyncio.sleep(10.0)
                finally:
                    one.fleet.cancelled(flight, time.monotonic())

            asking = [asyncio.create_task(request(number)) for number in range(2000)]
            most = 0
            while asking:
                await asyncio.sleep(rng.random() * 0.02)
                rng.shuffle(asking)
                for task in asking[:200]:
                    task.cancel()
                del asking[:200]
                most = max(most, await connections(server))
            assert most <= 2 * MOST_CONNECTIONS
            await until(lambda: sum(one.in_flight()) == sum(two.in_flight()) == 0)
            told = await server.ask("INFO", "commandstats")
            assert isinstance(told, dict) and "cmdstat_xadd" in told
            assert not told.keys() & {f"cmdstat_{name}" for name in ("watch", "multi", "exec")}, told
            link.delay_s = 0.0
            await members.stop()
        await no_clients(server)

    with_redis(scenario, timeout_ms=1_000.0, lease_s=5.0)
