"""Answers of DNS servers that are not the usual ones: aliases, times to live, too long for a datagram."""

import asyncio
from collections.abc import Callable

import pytest

from router.discovery.resolver import service_targets
from tests.discovery.changing_fleet import run, until_there_are
from tests.fakes.fake_dns import FakeDns
from tests.fakes.proxy_rig import until
from tests.fakes.router_rig import RouterRig

SRV = "_http._tcp.llm.example."
TTLS = (0, 1, 2**31 - 1)


async def _targets(change: Callable[[FakeDns], None]) -> tuple[list[tuple[str, int]], FakeDns]:
    server = FakeDns()
    await server.start()
    server.records = ["1 0 80 a.example.", "1 0 80 b.example."]
    change(server)
    try:
        return await service_targets(SRV, server.address, 5.0), server
    finally:
        server.stop()


def targets(change: Callable[[FakeDns], None]) -> tuple[list[tuple[str, int]], FakeDns]:
    return asyncio.run(_targets(change))


@pytest.mark.parametrize("count", [1, 3, 8])
def test_an_alias_is_followed_to_the_service_it_stands_for(count: int) -> None:
    def aliases(server: FakeDns) -> None:
        server.aliases = [f"_http._tcp.{number}.example." for number in range(count)]

    assert targets(aliases)[0] == [("a.example", 80), ("b.example", 80)]


def test_an_alias_of_a_service_that_is_not_there_is_an_empty_answer() -> None:
    def nowhere(server: FakeDns) -> None:
        server.aliases, server.records = ["_http._tcp.gone.example."], []

    assert targets(nowhere)[0] == []


def test_aliases_in_a_circle_are_no_answer() -> None:
    """An empty one would make the replicas leave."""

    def circle(server: FakeDns) -> None:
        server.aliases, server.records = ["_http._tcp.other.example.", SRV], []

    with pytest.raises(OSError, match="failed to answer"):
        targets(circle)


@pytest.mark.parametrize("ttl", [*TTLS, 2**32 - 1])
def test_whatever_the_time_to_live_the_records_count(ttl: int) -> None:
    assert targets(lambda server: setattr(server, "ttl", ttl))[0] == [("a.example", 80), ("b.example", 80)]


def test_two_hundred_records_are_asked_for_over_tcp() -> None:
    def many(server: FakeDns) -> None:
        server.records, server.truncates = [f"1 0 80 replica-{n}.example." for n in range(200)], True

    found, server = targets(many)
    assert len(found) == 200 and (server.questions, server.questions_by_tcp) == (2, 1)


@pytest.mark.parametrize("ttl", TTLS)
def test_a_time_to_live_keeps_nobody_in_or_out(ttl: int) -> None:
    """Names are asked for every ``interval_s``: nothing is kept for as long as an answer may be."""

    async def scenario(rig: RouterRig) -> None:
        server = FakeDns()
        await server.start()
        server.ttl = ttl
        ports = [rig.replicas[number].port for number in (1, 2)]
        settings = {"kind": "dns", "srv": SRV, "nameserver": server.address, "interval_s": 0.02}
        try:
            for port in (*ports, ports[0]):
                server.records = [f"1 0 {port} localhost."]
                if port == ports[0] and not server.questions:
                    await rig.reload(rig.entry(0), discovery=[settings])
                await until_there_are(rig, "r0", f"localhost:{port}")
            asked = server.questions
            await until(lambda: server.questions > asked + 3)
        finally:
            server.stop()

    run(scenario)
