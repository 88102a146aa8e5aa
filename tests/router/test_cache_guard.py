"""Guarding caches: held where sending costs others more hits than waiting costs; never for ever."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replica.contract.load_report import LoadReport
from router.proxy.explanation import explanation
from router.routing.cache_guard import WINDOW_S, CacheGuard
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from tests.router.closed_loop import prompt

CAPACITY = 20_000


def guarded_fleet(*, guard: bool = True, used: float = 0.5) -> tuple[Fleet, list[InFlight]]:
    """One replica with hits in the last minute, ``used`` of whose memory is pinned by ten that run."""
    fleet = Fleet(
        [ReplicaSpec("r0", "http://r0")],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(hold=True, guard_caches=guard, expected_output_tokens=100.0),
        layout=UniformLayout(16),
        tokens_per_unit=1.0,
    )
    fleet.probe_succeeded(0, 0.0)
    running = [send(fleet, prompt((f"running {number}", 320))) for number in range(10)]
    for flight in running:
        fleet.first_token(flight, 0.0)
    fleet.replicas[0].guard.sent(saved_s=WINDOW_S, tokens=0, now=0.0)  # a second a second
    fleet.load_reported(0, LoadReport(capacity_tokens=CAPACITY, kv_usage=used), 0.0)
    return fleet, running


def send(fleet: Fleet, asked: Prompt) -> InFlight:
    return fleet.sent(asked, fleet.decide(asked, 0.0), 0.0)


def test_the_prices_by_hand() -> None:
    guard = CacheGuard()
    guard.reported(0.5)
    guard.sent(saved_s=30.0, tokens=40_000, now=0.0)
    prices = guard.prices(60_000, 400_000, 8, held=2, decode_s=6.0, now=0.0)
    assert prices.lost_s == pytest.approx(0.5 * 6.0 * 60_000 / (400_000 - 200_000 - 40_000 - 60_000))
    assert prices.wait_s == pytest.approx(6.0 / 8 * 3)


def test_a_request_that_costs_more_hits_than_it_waits_is_held_until_one_ends() -> None:
    fleet, others = guarded_fleet()
    long = prompt(("long", 6_400))
    shown = explanation(fleet, *fleet.explain(long, 0.0))["candidates"][0]["guard"]
    assert shown["lost_ms"] > shown["wait_ms"] > 0.0
    held = fleet.submit(long, 0.0)
    assert isinstance(held, Held)
    short = fleet.submit(prompt(("short", 160)), 0.0)
    assert isinstance(short, InFlight), "hardly pins anything"
    fleet.first_token(short, 0.0)
    fleet.load_reported(0, LoadReport(capacity_tokens=CAPACITY, kv_usage=0.1), 0.0)
    running = [short, *others]
    while not fleet.outbox:
        fleet.finished(running.pop(), 0.0)
    # lost = D 6,500 / (18,000 - 6,500) = 0.57 D; wait = D / k (1 + 1): 0.5 D with four running, 0.67 with 3.
    assert fleet.outbox == [held] and held.flight is not None and len(running) == 3


@pytest.mark.parametrize("why", ["off", "empty cache", "nothing runs", "overdue"])
def test_nobody_waits_for_nothing(why: str) -> None:
    fleet, _ = guarded_fleet(guard=why != "off", used=0.0 if why == "empty cache" else 0.5)
    asked = prompt(("long", 1_600 if why == "empty cache" else 6_400))
    if why == "nothing runs":
        fleet = Fleet(
            [ReplicaSpec("r0", "http://r0")],
            POLICIES["predicted_finish"](random.Random(1)),
            FleetSettings(hold=True, guard_caches=True),
            layout=UniformLayout(16),
        )
        fleet.probe_succeeded(0, 0.0)
        fleet.load_reported(0, LoadReport(capacity_tokens=CAPACITY, kv_usage=1.0), 0.0)
    made = fleet.submit(asked, 0.0)
    if why == "overdue":
        assert isinstance(made, Held)
        fleet.tick(made.deadline)
        assert fleet.outbox == [made] and made.flight is not None
    else:
        assert isinstance(made, InFlight)
    if why == "off":
        assert explanation(fleet, *fleet.explain(asked, 0.0))["candidates"][0]["guard"] is None


@given(
    st.floats(0, 1), st.integers(0, 10**6), st.floats(0, 100), st.integers(1, 10**6), st.integers(1, 500),
    st.integers(0, 100), st.floats(1e-3, 1e3),
)  # fmt: skip
def test_the_more_wait_the_dearer_and_more_room_is_never_dearer(
    used: float, since: int, saved: float, tokens: int, running: int, held: int, decode_s: float
) -> None:
    guard = CacheGuard()
    guard.reported(used)
    guard.sent(saved, since, 0.0)
    one = guard.prices(tokens, 10**6, running, held=held, decode_s=decode_s, now=1.0)
    more_wait = guard.prices(tokens, 10**6, running, held=held + 1, decode_s=decode_s, now=1.0)
    more_room = guard.prices(tokens, 2 * 10**6, running, held=held, decode_s=decode_s, now=1.0)
    assert one.lost_s >= 0.0 and more_wait.wait_s > one.wait_s and more_room.lost_s <= one.lost_s
