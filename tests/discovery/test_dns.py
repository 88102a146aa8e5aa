"""Replicas from DNS: SRV records of a real server on a UDP port, and the addresses of a name."""

import asyncio
import logging

import dns.rcode
import pytest

from router.config_errors import ConfigError
from router.discovery import dns_source
from router.discovery.dns_source import DnsSource
from router.discovery.resolver import addresses, service_targets
from router.discovery.source import SourceStatus
from router.discovery_config import DnsDiscovery
from router.replica_config import ReplicaConfig
from tests.discovery.changing_fleet import names, run, traffic, until_there_are
from tests.fakes.fake_dns import FakeDns
from tests.fakes.proxy_rig import until
from tests.fakes.router_rig import RouterRig

SRV = "_http._tcp.llm.example."


def test_srv_records_come_and_go_while_requests_go_on(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: RouterRig) -> None:
        server = FakeDns()
        await server.start()
        one, two = (f"localhost:{rig.replicas[number].port}" for number in (1, 2))
        static = rig.entry(0)
        settings = {"kind": "dns", "srv": SRV, "nameserver": server.address, "interval_s": 0.02}

        def points_to(*hosts: str) -> None:
            server.records = [f"1 5 {host.rpartition(':')[2]} localhost." for host in hosts]

        async def asked_again(times: int) -> None:
            asked = server.questions
            await until(lambda: server.questions > asked + times)

        try:
            async with traffic(rig):
                points_to(one)
                server.records.append("2 5 9 second.choice.")
                await rig.reload(static, discovery=[{**settings, "replica": {"tags": ["found"]}}])
                await until_there_are(rig, "r0", one)
                assert (await rig.fleet())[one]["tags"] == ["found"]
                points_to(one, two)
                await until_there_are(rig, "r0", one, two)
                server.rcode = dns.rcode.SERVFAIL
                await until(lambda: any("no answer" in line for line in caplog.messages))
                await asked_again(5)
                assert names(rig) == {"r0", one, two}
                server.rcode = dns.rcode.NOERROR
                points_to(two)
                await until_there_are(rig, "r0", two)
                points_to()
                await until_there_are(rig, "r0")
                assert any("an empty answer; 3 in a row" in line for line in caplog.messages)
                points_to(one)
                await until_there_are(rig, "r0", one)
        finally:
            server.stop()

    caplog.set_level(logging.INFO)
    run(scenario)


def test_addresses_of_a_name_are_replicas() -> None:
    async def scenario(rig: RouterRig) -> None:
        port = rig.replicas[1].port
        await rig.reload(rig.entry(0), discovery=[{"kind": "dns", "host": "127.0.0.1", "port": port}])
        await until_there_are(rig, "r0", f"127.0.0.1:{port}")

    run(scenario)


async def _targets(*records: str) -> list[tuple[str, int]]:
    """What SRV ``records`` are taken to say."""
    server = FakeDns()
    await server.start()
    server.records = list(records)
    try:
        return await service_targets(SRV, server.address, 5.0)
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("records", "places"),
    [
        (
            ("1 5 80 a.example.", "1 6 80 a.example.", "1 6 81 A.EXAMPLE."),
            [("a.example", 80), ("a.example", 81)],
        ),
        (("1 0 80 b.example.", "1 65535 80 a.example."), [("a.example", 80), ("b.example", 80)]),
        (("0 0 80 .",), []),
        (("0 0 80 .", "0 0 0 b.example.", "2 0 80 c.example.", "3 0 80 d.example."), [("c.example", 80)]),
    ],
    ids=["one place in several records and letters", "weights", "no such service", "no places"],
)
def test_srv_records_name_each_place_once(records: tuple[str, ...], places: list[tuple[str, int]]) -> None:
    assert asyncio.run(_targets(*records)) == places


def test_one_replica_in_two_records_is_one_replica() -> None:
    async def scenario(rig: RouterRig) -> None:
        server = FakeDns()
        await server.start()
        one = f"localhost:{rig.replicas[1].port}"
        port = rig.replicas[1].port
        settings = {"kind": "dns", "srv": SRV, "nameserver": server.address, "interval_s": 0.02}
        try:
            server.records = [f"1 5 {port} localhost.", f"1 6 {port} LOCALHOST."]
            await rig.reload(rig.entry(0), discovery=[settings])
            await until_there_are(rig, "r0", one)
            assert [replica.name for replica in rig.router.fleet.replicas.staying] == ["r0", one]
            server.records = []
            await until_there_are(rig, "r0")
        finally:
            server.stop()

    run(scenario)


def test_names_that_no_host_can_have_cost_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    assert _told([["a", "b c", "d/e"], ["a", "b c", "d/e"], ["b c"], ["b c"], ["b c"], ["a"]]) == [
        ("http://a:80",),
        ("http://a:80",),
        (),
        ("http://a:80",),
    ]
    lines = [line for line in caplog.messages if "no names of hosts" in line]
    assert lines == [
        "dns h:80: no names of hosts: 'b c':80, 'd/e':80. Not used",
        "dns h:80: no names of hosts: 'b c':80. Not used",
    ]


def _told(answers: list[list[str] | OSError], empty_answers: int = 3) -> list[tuple[str, ...]]:
    """What a source tells whose resolver gives ``answers``, as URLs."""
    told: list[tuple[str, ...]] = []
    config = DnsDiscovery(kind="dns", host="h", port=80, interval_s=1e-6, empty_answers=empty_answers)
    left = list(answers)

    async def resolve() -> list[tuple[str, int]]:
        if not left:
            raise asyncio.CancelledError
        answer = left.pop(0)
        if isinstance(answer, OSError):
            raise answer
        return [(host, 80) for host in answer]

    def found(replicas: tuple[ReplicaConfig, ...]) -> None:
        told.append(tuple(one.url for one in replicas))

    async def watch() -> None:
        with pytest.raises(asyncio.CancelledError):
            await DnsSource(config, resolve).watch(found, SourceStatus(config.label))

    asyncio.run(watch())
    return told


def test_an_empty_answer_counts_when_it_came_often_enough() -> None:
    a = ("http://a:80",)
    assert _told([["a"], [], [], ["a"]]) == [a, a]
    assert _told([["a"], [], [], []]) == [a, ()]
    assert _told([["a"], [], OSError("late"), [], []]) == [a, ()]
    assert _told([["a"], []], empty_answers=1) == [a, ()]
    assert _told([["a"], [], ["a"]], empty_answers=2) == [a, a]
    assert _told([[]]) == [()]
    assert _told([TimeoutError(), ["fd00::1"]]) == [("http://[fd00::1]:80",)]


def test_a_name_that_does_not_exist_is_an_empty_answer() -> None:
    assert asyncio.run(addresses("127.0.0.1", 80, 5.0)) == ["127.0.0.1"]
    assert asyncio.run(addresses("::1", 80, 5.0)) == ["::1"]


def test_srv_without_its_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dns_source.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'warmroute\[dns\]'"):
        DnsSource(DnsDiscovery(kind="dns", srv=SRV))
