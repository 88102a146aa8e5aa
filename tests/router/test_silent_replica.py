"""A replica whose engine hangs behind a server that answers: found by those who wait there."""

import asyncio

import pytest

from router.routing.decision import Reason
from router.routing.fleet import Fleet
from router.routing.health import HealthSettings, HealthState
from router.routing.in_flight import InFlight, Usage
from router.routing.prompt_blocks import Prompt
from tests.fakes.fake_replica import STREAM_HEAD, Hang, Send
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM, LIMIT_S, Rig, with_rig
from tests.fakes.raw_client import RawAnswer
from tests.router.small_fleet import make_fleet, prompt, send

HEALTH = HealthSettings(backoff_s=1.0, silent_after_s=30.0, silent_factor=5.0)


def taught(replicas: int = 3, **settings: object) -> Fleet:
    """A fleet that has learned what its work costs; the time is 100 s."""
    fleet = make_fleet(replicas, "round_robin", **{"health": HEALTH, **settings})
    for lesson in range(40):
        flight = send(fleet, prompt(lesson), float(lesson))
        fleet.first_token(flight, lesson + 0.1)
        fleet.finished(flight, lesson + 0.5, Usage(19, 5, 0))
    return fleet


def sent_to(fleet: Fleet, replica: int, asked: Prompt, now: float) -> InFlight:
    return fleet.sent(asked, fleet.decide(asked, now, within={replica}), now)


def produces(fleet: Fleet, replica: int, now: float) -> None:
    fleet.finished(sent_to(fleet, replica, prompt(7), now - 0.1), now)


def state(fleet: Fleet, replica: int) -> HealthState:
    return fleet.replicas[replica].health.state


def test_it_is_ejected_gets_one_at_a_time_and_returns_when_it_produces() -> None:
    fleet = taught()
    waits = sent_to(fleet, 0, prompt(1), 100.0)
    produces(fleet, 1, 120.0)
    assert not fleet.still_waits(waits, 130.0)
    assert fleet.still_waits(waits, 130.1)
    assert state(fleet, 0) is HealthState.EJECTED and fleet.replicas[0].health.silent_at == 130.1
    assert not fleet.replicas[0].health.unreachable  # so nobody who waits there is moved
    assert {fleet.decide(prompt(2), 130.2).replica for _ in range(6)} == {1, 2}
    fleet.probe_succeeded(0, 132.0)  # its server is well
    assert state(fleet, 0) is HealthState.PROBATION
    assert {fleet.decide(prompt(2), 132.1).replica for _ in range(6)} == {1, 2}  # one waits there already
    assert not fleet.still_waits(waits, 200.0)  # nothing new
    fleet.cancelled(waits, 200.0)
    tries = [send(fleet, prompt(2), 201.0) for _ in range(6)]
    there = [one for one in tries if one.replica.index == 0]
    assert len(there) == 1
    produces(fleet, 1, 230.0)
    assert fleet.still_waits(there[0], 231.1)  # the next back-off
    assert state(fleet, 0) is HealthState.EJECTED
    fleet.first_token(there[0], 240.0)
    fleet.probe_succeeded(0, 240.1)  # within the back-off
    assert state(fleet, 0) is HealthState.HEALTHY and fleet.replicas[0].health.silent_at is None


def test_a_long_prefill_and_who_waits_behind_it_are_no_silence() -> None:
    fleet = taught()
    long = Prompt(keys=[], units=1_000_000, stream=True)
    waits = sent_to(fleet, 0, long, 100.0)
    predicted_s = waits.decision.prefill_s
    assert predicted_s > 60.0
    behind = sent_to(fleet, 0, prompt(2), 101.0)
    assert behind.decision.wait_s > predicted_s - 2.0
    now = 100.0
    while now < 100.0 + 5.0 * predicted_s - 10.0:
        now += 10.0
        produces(fleet, 1, now)
        assert not fleet.still_waits(waits, now) and not fleet.still_waits(behind, now)
    assert fleet.still_waits(waits, now + 15.0)


def test_a_reply_that_is_not_streamed_has_the_time_it_may_take() -> None:
    fleet = taught()
    step_s = fleet.replicas[0].cost.step_s(1)
    long = Prompt(keys=[], units=20, stream=False, max_tokens=int(20.0 / step_s))
    free = Prompt(keys=[], units=20, stream=False)
    one, other = sent_to(fleet, 0, long, 100.0), sent_to(fleet, 1, free, 100.0)
    produces(fleet, 2, 199.0)
    assert not fleet.still_waits(one, 198.0)
    assert fleet.still_waits(one, 202.0)
    assert not fleet.still_waits(other, 100.0 + 45.0 * fleet.traffic.output_tokens * step_s)


def _nobody_else_produces(fleet: Fleet, waits: InFlight) -> None:
    pass


def _it_produces_for_another(fleet: Fleet, waits: InFlight) -> None:
    produces(fleet, 1, 120.0)
    produces(fleet, 0, 120.0)


def _who_produced_is_drained(fleet: Fleet, waits: InFlight) -> None:
    produces(fleet, 1, 120.0)
    fleet.drained(1, 121.0)


@pytest.mark.parametrize("then", [_nobody_else_produces, _it_produces_for_another, _who_produced_is_drained])
def test_what_is_no_silence(then: object) -> None:
    fleet = taught()
    waits = sent_to(fleet, 0, prompt(1), 100.0)
    then(fleet, waits)  # type: ignore[operator]
    assert not fleet.still_waits(waits, 140.0)
    assert state(fleet, 0) is HealthState.HEALTHY


def test_it_can_be_switched_off_and_is_before_anything_was_learned() -> None:
    never = HealthSettings(silent_after_s=None)
    for fleet in (taught(health=never), make_fleet(3, "round_robin", health=HEALTH)):
        waits = sent_to(fleet, 0, prompt(1), 100.0)
        produces(fleet, 1, 120.0)
        assert not fleet.still_waits(waits, 10_000.0)


def test_what_its_server_refuses_is_no_sign_of_life() -> None:
    fleet = taught()
    waits = sent_to(fleet, 0, prompt(1), 100.0)
    produces(fleet, 1, 120.0)
    assert fleet.still_waits(waits, 131.0)
    fleet.cancelled(waits, 131.0)
    fleet.probe_succeeded(0, 133.0)
    fleet.refused(sent_to(fleet, 0, prompt(3), 134.0), 134.1)
    assert state(fleet, 0) is HealthState.PROBATION


def test_when_all_are_silent_one_is_tried_all_the_same() -> None:
    fleet = taught(2)
    first, second = sent_to(fleet, 0, prompt(1), 100.0), sent_to(fleet, 1, prompt(1), 125.0)
    produces(fleet, 1, 124.0)
    assert fleet.still_waits(first, 131.0)
    assert not fleet.still_waits(second, 156.0)  # nobody else is left to compare it with
    fleet.probe_failed(1, 157.0, refused=True)
    assert fleet.decide(prompt(2), 158.0).reason is Reason.PANIC


def test_on_real_sockets_it_is_found_told_and_left(caplog: pytest.LogCaptureFixture) -> None:
    """First a head at once and no token, as vLLM does; the other replica has its requests answered."""

    async def scenario(rig: Rig) -> None:
        hangs = rig.replica
        for _ in range(48):
            assert (await rig.ask(CHAT_STREAM)).whole
        hangs.default = [Send(STREAM_HEAD), Hang()]
        fleet = rig.fleet
        while not hangs.answering:
            client = await rig.client()
            await client.post(CHAT_STREAM)
            await client.head()
        before = len(hangs.requests)

        asked: list[asyncio.Task[RawAnswer]] = []

        async def ask_on() -> None:
            while fleet.replicas[0].health.silent_at is None:
                asked.append(asyncio.create_task(rig.ask(CHAT if len(asked) % 2 else CHAT_STREAM)))
                await asyncio.wait(asked[-1:], timeout=0.05)

        await asyncio.wait_for(ask_on(), LIMIT_S)
        assert "replica r0 is ejected: it answers probes, but has produced nothing" in caplog.text
        for _ in range(6):
            assert (await rig.ask(CHAT)).whole
        assert len(hangs.requests) - before < len(asked)
        assert hangs.answering  # left alone
        for task in asked:
            task.cancel()

    with_rig(
        scenario,
        replicas=2,
        policy={"kind": "predicted_finish"},
        health={"silent_after_s": 0.2, "silent_factor": 1.0},
        timeouts={"first_byte_s": 2.0},
    )
