"""A replica's own pages as they may come over a network: in pieces, or without an end."""

import logging

import pytest

from router.routing.health import HealthState
from tests.fakes.fake_replica import (
    FakeReplica,
    Plan,
    SeenRequest,
    Send,
    SendByteByByte,
    head,
    healthy,
    sized,
)
from tests.fakes.proxy_rig import until
from tests.fakes.router_rig import RouterRig, with_router

METRICS = b"""vllm:num_requests_running{model_name="m"} 3.0
vllm:num_requests_waiting{model_name="m"} 2.0
vllm:kv_cache_usage_perc{model_name="m"} 0.25
"""
ENDLESS_BYTES = 64 << 20


def test_a_page_that_comes_in_pieces_is_read_whole() -> None:
    def pages(probe: SeenRequest) -> Plan:
        if probe.target != b"/metrics":
            return healthy(probe)
        page = sized(METRICS, content_type="text/plain")
        first = len(page) - len(METRICS) + METRICS.index(b"\n") + 1
        return [Send(page[:first]), SendByteByByte(page[first:])]

    async def scenario(rig: RouterRig) -> None:
        (replica,) = rig.router.fleet.replicas
        await until(lambda: replica.last_report is not None)
        report = replica.last_report
        assert report is not None
        assert (report.running, report.waiting, report.kv_usage) == (3, 2, 0.25)

    def in_pieces(fake: FakeReplica) -> None:
        fake.probe = pages

    with_router(scenario, before=in_pieces)


def test_a_page_without_an_end_is_not_taken_into_memory() -> None:
    def pages(probe: SeenRequest) -> Plan:
        if probe.target == b"/v1/models":
            return healthy(probe)
        piece = Send(bytes(1 << 20))
        return [Send(head(content_length=str(ENDLESS_BYTES))), *[piece] * (ENDLESS_BYTES >> 20)]

    async def scenario(rig: RouterRig) -> None:
        fake = rig.replica
        (replica,) = rig.router.fleet.replicas
        await until(lambda: len(fake.probes) >= 4)
        assert replica.health.state is HealthState.HEALTHY and replica.models == frozenset({"m"})
        pages_asked = sum(probe.target != b"/v1/models" for probe in fake.probes)
        assert fake.sent_bytes < pages_asked * ENDLESS_BYTES / 3  # what the kernel's buffers hold included

    def endless(fake: FakeReplica) -> None:
        fake.probe = pages

    with_router(scenario, before=endless)


def test_a_server_without_a_model_list_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """B083: something else than an engine may answer there, and then nobody is told why requests fail."""

    def nothing(probe: SeenRequest) -> Plan:
        return [Send(sized(b"no such page", 404, "Not Found"))]

    def said(word: str) -> list[str]:
        return [one.getMessage() for one in caplog.records if word in one.getMessage()]

    async def scenario(rig: RouterRig) -> None:
        fake = rig.replica
        (replica,) = rig.router.fleet.replicas
        asked = len(fake.probes) + 12
        await until(lambda: len(fake.probes) >= asked)
        assert replica.health.state is HealthState.HEALTHY and replica.models is None
        (warning,) = said("gave no model list")
        assert f"GET {fake.url}/v1/models" in warning and "r0" in warning
        fake.probe = healthy
        await until(lambda: replica.models is not None)
        await until(lambda: said("lists its models now") != [])
        assert len(said("gave no model list")) == 1

    def other(fake: FakeReplica) -> None:
        fake.probe = nothing

    with caplog.at_level(logging.INFO, "warmroute"):
        with_router(scenario, before=other)
