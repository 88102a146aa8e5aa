"""A replica of the config gets work, and counts as up, from its first good probe on."""

import logging
from collections.abc import Callable

import pytest

from tests.fakes.fake_replica import FakeReplica, Hang, Send, healthy, sized
from tests.fakes.proxy_rig import CHAT
from tests.fakes.router_rig import QUICK_HEALTH, RouterRig, with_router

ONCE = {**QUICK_HEALTH, "interval_s": 3600.0}
"""What a scenario sees comes of the first probe alone."""


def answers_probes_with(*statuses: int) -> Callable[[FakeReplica], None]:
    """Of the fakes in their order; 200 stands for all that a healthy one answers."""
    following = iter(statuses)

    def prepare(fake: FakeReplica) -> None:
        status = next(following)
        fake.probe = healthy if status == 200 else [Send(sized(b"{}", status, "Loading"))]

    return prepare


@pytest.mark.parametrize("status", [500, 503])
def test_a_replica_whose_first_probe_fails_is_not_up(status: int, caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(rig: RouterRig) -> None:
        assert await rig.answered_by() == {"r1"}
        assert (await rig.get("/readiness")).status == 200
        shown = await rig.fleet()
        assert [(shown[name]["health"], shown[name]["usable"]) for name in ("r0", "r1")] == [
            ("ejected", False),
            ("healthy", True),
        ]
        said = [record.getMessage() for record in caplog.records]
        assert [line for line in said if line.startswith("replica r0 is")] == [
            f"replica r0 is ejected: GET {rig.replica.url}/health: status {status}"
        ]
        assert any(line.endswith("1 of 2 replicas up") for line in said)

    with caplog.at_level(logging.INFO, "warmroute"):
        with_router(
            scenario, replicas=2, before=answers_probes_with(status, 200), health=ONCE, expose_routing=True
        )


@pytest.mark.parametrize("readiness", ["replica", "router"])
def test_a_router_is_not_ready_before_the_first_good_probe(readiness: str) -> None:
    async def scenario(rig: RouterRig) -> None:
        assert (await rig.get("/readiness")).status == 503
        answer = await rig.ask(CHAT)  # it is tried all the same: the probe may be wrong
        assert (answer.status, answer.field("x-warmroute-reason")) == (503, "panic")
        assert (await rig.get("/readiness")).status == 503
        rig.replica.probe, rig.replica.default = healthy, answering
        await rig.until_health("r0", "probation")
        assert (await rig.get("/readiness")).status == 200
        assert (await rig.ask(CHAT)).status == 200

    answering = FakeReplica().default

    def loading(fake: FakeReplica) -> None:
        fake.probe = fake.default = [Send(sized(b"{}", 503, "Loading"))]

    with_router(scenario, before=loading, readiness=readiness, expose_routing=True)


def test_a_replica_that_could_not_be_probed_is_tried_where_there_is_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("router.proxy.prober.is_own", lambda error: True)

    async def scenario(rig: RouterRig) -> None:
        assert (await rig.fleet())["r0"]["health"] == "unknown"
        assert "replica r0 could not be probed yet: the router has no socket left" in caplog.text
        assert (await rig.get("/readiness")).status == 503
        await rig.replica.start()
        answer = await rig.ask(CHAT)
        assert (answer.status, answer.field("x-warmroute-reason")) == (200, "panic")
        assert (await rig.fleet())["r0"]["health"] == "healthy"

    with_router(scenario, down=1, health=ONCE, expose_routing=True)


def test_a_replica_too_busy_for_its_first_probe_is_asked_again_soon_and_not_ejected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As where a router starts in front of a loaded fleet. Nothing but the retry can find it well."""

    def busy(fake: FakeReplica) -> None:
        if not hung:
            fake.probe = [Hang()]
            hung.append(fake)

    hung: list[FakeReplica] = []

    async def scenario(rig: RouterRig) -> None:
        assert (await rig.fleet())["r0"]["health"] == "unknown"
        assert await rig.answered_by() == {"r1"}
        hung[0].probe = healthy
        await rig.until_health("r0", "healthy")
        said = [record.getMessage() for record in caplog.records if "replica r0" in record.getMessage()]
        assert "replica r0 could not be probed yet" in said[0] and "no answer within" in said[0]
        assert not any("ejected" in line for line in said)

    with caplog.at_level(logging.INFO, "warmroute"):
        with_router(
            scenario,
            replicas=2,
            before=busy,
            health={**ONCE, "probe_failures_to_eject": 1_000},
            expose_routing=True,
        )


def test_a_replica_that_never_answers_its_first_probes_is_ejected() -> None:
    async def scenario(rig: RouterRig) -> None:
        await rig.until_health("r0", "ejected")
        assert len(rig.replica.probes) >= 2

    with_router(scenario, before=lambda fake: setattr(fake, "probe", [Hang()]), health=ONCE)
