"""Holding: nobody is lost or sent twice, the shortest goes first, nobody starves, silence is given up on."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.decision import Reason
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure

BLOCK = 16


def make_fleet(replicas: int = 1) -> Fleet:
    fleet = Fleet(
        [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(replicas)],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(hold=True),
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


def prompt(name: int, blocks: int, *, stream: bool = True) -> Prompt:
    keys = [name * 1_000_000 + block for block in range(blocks)]
    return Prompt(keys=keys, units=blocks * BLOCK + 3, layout=UniformLayout(BLOCK), stream=stream)


def released(fleet: Fleet) -> list[Held]:
    out = list(fleet.outbox)
    fleet.outbox.clear()
    return out


def test_an_idle_replica_holds_nobody() -> None:
    fleet = make_fleet()
    assert isinstance(fleet.submit(prompt(1, 100), 0.0), InFlight)
    assert isinstance(fleet.submit(prompt(2, 100), 0.0), Held)


def test_the_shortest_goes_first_and_one_at_a_time() -> None:
    fleet = make_fleet()
    running = fleet.submit(prompt(1, 500), 0.0)
    assert isinstance(running, InFlight)
    for name, blocks in ((2, 400), (3, 50), (4, 200)):
        assert isinstance(fleet.submit(prompt(name, blocks), 0.0, context=name), Held)
    order = []
    for second in range(1, 4):
        fleet.first_token(running, float(second) / 10)
        (held,) = released(fleet)
        assert held.flight is not None
        order.append(held.context)
        running = held.flight
    assert order == [3, 4, 2] and fleet.held == 0


def test_what_is_computed_soon_is_not_held() -> None:
    """A prompt of a few tokens behind another: holding it would only cost it time."""
    fleet = make_fleet()
    assert isinstance(fleet.submit(prompt(1, 1), 0.0), InFlight)
    assert isinstance(fleet.submit(prompt(2, 1), 0.0), InFlight)
    assert isinstance(fleet.submit(prompt(3, 200), 0.0), Held), "0.2 s of prefill"


def test_the_overdue_go_first_oldest_first() -> None:
    fleet = make_fleet()
    running = fleet.submit(prompt(1, 500), 0.0)
    assert isinstance(running, InFlight)
    fleet.submit(prompt(2, 400), 0.0, context="long")
    fleet.submit(prompt(3, 50), 8.0, context="short")
    fleet.first_token(running, 8.0)
    (first,) = released(fleet)
    assert first.context == "long"


def test_an_engine_that_computes_many_at_once_is_kept_busy() -> None:
    """A tenth of what the SLO allows may be queued there, here 100 ms: more than the one step before."""
    fleet = make_fleet(1)
    sent = [fleet.submit(prompt(number, 4), 0.0) for number in range(40)]
    running = [one for one in sent if isinstance(one, InFlight)]
    assert 1 < len(running) < 40
    assert fleet.replicas[0].ledger.queued_prefill_s <= 0.1


def test_short_ones_do_not_keep_a_long_one_out_for_ever() -> None:
    fleet = make_fleet(1)
    first, long = fleet.submit(prompt(0, 4), 0.0), fleet.submit(prompt(1, 400), 0.0)
    assert isinstance(first, InFlight) and isinstance(long, Held)
    now, running = 0.0, [first]
    while long.flight is None and now < 60.0:
        now += 0.02
        short = fleet.submit(prompt(1_000 + int(now * 1_000), 4), now)
        running += [short] if isinstance(short, InFlight) else []
        while len(running) > 2 or (running and now > long.deadline):  # until then one is always on its way
            fleet.first_token(running.pop(0), now)
            running += [held.flight for held in released(fleet) if held.flight not in (None, long.flight)]
    assert long.deadline < now < long.deadline + 1.0


def test_siblings_follow_each_other() -> None:
    """Two prompts with one new prefix: the second is booked as warm and waits for the first."""
    fleet = make_fleet(2)
    fleet.submit(prompt(5, 900), 0.0)  # keeps one replica busy
    head = prompt(1, 300)
    first = fleet.submit(head, 0.0)
    longer = Prompt(keys=[*head.keys, 9], units=head.units + BLOCK, layout=head.layout, stream=True)
    second = fleet.submit(longer, 0.0)
    assert isinstance(first, InFlight) and isinstance(second, Held)
    assert second.decision.replica == first.replica.index
    assert second.decision.reason is Reason.WARM and second.decision.matched_tokens == 300 * BLOCK


def test_one_who_leaves_while_held_leaves_no_trace() -> None:
    fleet = make_fleet()
    running = fleet.submit(prompt(1, 100), 0.0)
    held = fleet.submit(prompt(2, 100), 0.0)
    assert isinstance(running, InFlight) and isinstance(held, Held)
    fleet.dropped(held, 0.1)
    fleet.first_token(running, 0.2)
    assert fleet.held == 0 and not fleet.outbox
    assert fleet.index.match(prompt(2, 100).keys) == [0]


@pytest.mark.parametrize("how", ["refused", "probe", "drain"])
def test_a_replica_that_goes_hands_its_queue_on(how: str) -> None:
    fleet = make_fleet(2)
    flights = [fleet.submit(prompt(name, 200), 0.0, context=name) for name in range(8)]
    assert sum(isinstance(flight, Held) for flight in flights) == 6
    if how == "refused":
        victim = next(f for f in flights if isinstance(f, InFlight) and f.replica.index == 0)
        fleet.failed(victim, 0.1, Failure.CONNECT)
    elif how == "probe":
        fleet.probe_failed(0, 0.1, refused=True)
    else:
        fleet.drained(0, 0.1)
    assert not released(fleet), "the other replica is busy, too: they wait for it now, they do not flood it"
    assert len(fleet.replicas[0].held) == 0 and len(fleet.replicas[1].held) == fleet.held == 6
    busy = next(f for f in flights if isinstance(f, InFlight) and f.replica.index == 1)
    fleet.first_token(busy, 0.2)
    (first,) = released(fleet)
    assert first.flight is not None and first.flight.replica.index == 1


def test_when_nobody_is_left_they_are_told() -> None:
    fleet = make_fleet(1)
    fleet.submit(prompt(1, 200), 0.0)
    fleet.submit(prompt(2, 200), 0.0, context="held")
    fleet.drained(0, 0.1)
    (held,) = released(fleet)
    assert held.context == "held" and held.flight is None and fleet.held == 0


def test_requests_that_are_not_streamed_make_room_in_time() -> None:
    fleet = make_fleet()
    first = fleet.submit(prompt(1, 500, stream=False), 0.0)
    held = fleet.submit(prompt(2, 500, stream=False), 0.0)
    assert isinstance(first, InFlight) and isinstance(held, Held)
    fleet.tick(first.decision.prefill_s * 0.9)
    assert not fleet.outbox
    fleet.tick(first.decision.prefill_s * 1.1)
    assert released(fleet) == [held]


def test_a_silent_replica_is_given_up_on() -> None:
    fleet = make_fleet(2)
    fleet.drained(1, 0.0)
    fleet.submit(prompt(1, 100), 0.0)
    held = fleet.submit(prompt(2, 100), 0.0)
    fleet.drained(1, 0.0, on=False)
    assert isinstance(held, Held)
    fleet.tick(5.0)
    assert not fleet.outbox, "late, as a slow replica is"
    fleet.tick(12.0)
    assert released(fleet) == [held]
    assert held.flight is not None and held.flight.replica.index == 1


steps = st.lists(
    st.tuples(
        st.sampled_from(
            ["submit", "first", "finish", "fail", "cancel", "drop", "drain", "back", "probe", "tick"]
        ),
        st.integers(0, 60),
        st.floats(0, 1.0),
    ),
    max_size=80,
)


@given(script=steps)
@settings(deadline=None, max_examples=120)
def test_nobody_is_lost_nor_sent_twice(script: list[tuple[str, int, float]]) -> None:
    fleet, now = make_fleet(3), 0.0
    flights: list[InFlight] = []
    waiting: list[Held] = []
    failures = list(Failure)
    for action, which, pause in script:
        now += pause
        if action == "submit":
            try:
                outcome = fleet.submit(prompt(which % 9, which * 3, stream=bool(which % 3)), now)
            except Exception as error:
                assert type(error).__name__ == "NoReplica"
                continue
            (flights if isinstance(outcome, InFlight) else waiting).append(outcome)  # type: ignore[arg-type]
        elif action == "drain":
            fleet.drained(which % 3, now)
        elif action == "back":
            fleet.drained(which % 3, now, on=False)
        elif action == "probe":
            fleet.probe_succeeded(which % 3, now)
        elif action == "tick":
            fleet.tick(now)
        elif action == "drop":
            if waiting:
                fleet.dropped(waiting.pop(which % len(waiting)), now)
        elif flights:
            flight = flights[which % len(flights)]
            if action == "first":
                fleet.first_token(flight, now)
            elif action == "finish":
                fleet.finished(flight, now, Usage(100, 10, which))
            elif action == "fail":
                fleet.failed(flight, now, failures[which % len(failures)])
            else:
                fleet.cancelled(flight, now)
        for held in released(fleet):
            waiting.remove(held)  # raises if it was not waiting
            if held.flight is not None:
                flights.append(held.flight)
        assert fleet.held == len(waiting) == sum(len(r.held) for r in fleet.replicas)
        assert sum(r.in_flight for r in fleet.replicas) == sum(not f.over for f in flights)
        for replica in fleet.replicas:
            if len(replica.held):
                assert replica.ledger.queued, "held though nothing is ahead"
            assert replica.held.prefill_s == pytest.approx(
                sum(h.prefill_s for h in waiting if h.decision.replica == replica.index), abs=1e-6
            )
        fleet.index.check_invariants()
    for held in waiting:
        fleet.dropped(held, now)
    for flight in flights:
        fleet.cancelled(flight, now)
    assert fleet.held == 0 and not fleet.outbox
    assert all(r.in_flight == 0 and r.ledger.outstanding_tokens == 0 for r in fleet.replicas)
