"""A router without a socket left says so and blames no replica; requests that go in circles are stopped."""

import logging
import resource

import pytest

from router.proxy.sockets import raise_limit
from router.routing.health import HealthState
from tests.fakes.proxy_rig import CHAT, Rig, until, with_rig
from tests.fakes.router_rig import RouterRig, with_router


def test_no_replica_is_blamed_where_the_router_has_no_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("router.proxy.replica_pool.is_own", lambda error: True)

    async def scenario(rig: Rig) -> None:
        await rig.replicas[0].kill()
        for _ in range(5):
            await rig.ask(CHAT)
        answers = [await rig.ask(CHAT) for _ in range(2)]
        assert {answer.status for answer in answers} == {200, 503}
        (refused,) = (answer for answer in answers if answer.status == 503)
        assert refused.error["code"] == "out_of_sockets" and refused.field("retry-after") == "1"
        assert rig.fleet.replicas[0].health.state is HealthState.HEALTHY
        assert rig.counters.retries == 0  # another connection could not be made either

    with_rig(scenario, replicas=2)


def test_a_probe_that_was_not_sent_ejects_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Exception] = []

    def is_own(error: Exception) -> bool:
        asked.append(error)
        return True

    monkeypatch.setattr("router.proxy.prober.is_own", is_own)

    async def scenario(rig: RouterRig) -> None:
        await rig.until_health("r0", "healthy")
        await rig.replica.kill()
        before = len(asked)
        await until(lambda: len(asked) > before + 3)
        (replica,) = rig.router.fleet.replicas
        assert replica.health.state is HealthState.HEALTHY

    with_router(scenario)


def test_the_soft_limit_is_raised_as_far_as_need_be(caplog: pytest.LogCaptureFixture) -> None:
    before = soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    least = 512 if hard == resource.RLIM_INFINITY else min(512, hard)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (least, hard))
        raise_limit(450)
        raised = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert raised == (1000 if hard == resource.RLIM_INFINITY else min(1000, hard))
        raise_limit(10)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == raised, "it is never lowered"
        if hard != resource.RLIM_INFINITY:
            with caplog.at_level(logging.WARNING, "warmroute"):
                raise_limit(hard)
            assert f"{hard} clients" in caplog.text
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert soft == resource.getrlimit(resource.RLIMIT_NOFILE)[0]


def test_each_hop_adds_itself_to_via_and_knows_itself_again() -> None:
    async def scenario(rig: Rig) -> None:
        hop = rig.plane.service.settings.hop.decode()
        assert (await rig.ask(CHAT, Via="1.0 fred, 1.1 warmroute-other")).status == 200
        vias = [value for name, value in rig.replica.requests[0].fields if name == b"via"]
        assert vias == [b"1.0 fred, 1.1 warmroute-other", f"1.1 {hop}".encode()]
        answer = await rig.ask(CHAT, Via=f"1.1 {hop}, 1.1 warmroute-other")
        assert (answer.status, answer.error["code"]) == (508, "loop")
        assert len(rig.replica.requests) == 1
        assert rig.counters.errors["loop"] == 1

    with_rig(scenario)
