"""Whatever routers do, and whichever news is late or lost, what they know of each other ends alike."""

import random
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.fleet import Fleet
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import Journal
from router.routing.peer_events import PeerEvent
from router.routing.retry import Failure
from tests.router.two_routers import figures, make_fleet, nothing, prompt, restate, sent


class Link:
    """One way from a router to another: late, and at times everything is lost until the next statement."""

    def __init__(self, origin: Fleet, journal: Journal, target: Fleet) -> None:
        self.origin, self.journal, self.target = origin, journal, target
        self.under_way: list[list[PeerEvent]] = []
        self.lossy = False

    def carry(self, now: float) -> None:
        for events in self.under_way:
            self.target.peers.told(self.journal.router, events, now)
        self.under_way.clear()

    def restate(self, now: float) -> None:
        self.carry(now)
        restate(self.target, self.journal.router, self.journal, self.origin, now)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_ledgers_of_peers_converge_to_zero(seed: int, hold: bool) -> None:
    rng = random.Random(seed)
    made = [make_fleet(name, hold=hold) for name in "ab"]
    links = [Link(*made[0], made[1][0]), Link(*made[1], made[0][0])]
    flights: list[tuple[Fleet, InFlight]] = []
    waiting: list[tuple[Fleet, Held]] = []

    def released() -> None:
        for fleet, _ in made:
            for held in fleet.outbox:
                waiting.remove((fleet, held))
                if held.flight is not None:
                    flights.append((fleet, held.flight))
            fleet.outbox.clear()

    def submit(now: float) -> None:
        fleet, _ = rng.choice(made)
        one = fleet.submit(prompt(rng.randrange(5), rng.randrange(1, 300), stream=rng.random() < 0.8), now)
        if isinstance(one, Held):
            waiting.append((fleet, one))
        else:
            flights.append((fleet, one))

    def end(now: float) -> None:
        if not flights:
            return
        fleet, flight = flights.pop(rng.randrange(len(flights)))
        ends: list[Callable[[], object]] = [
            lambda: fleet.finished(flight, now, Usage(flight.prompt.units, 5, 0)),
            lambda: fleet.failed(flight, now, Failure.CLOSED),
            lambda: fleet.cancelled(flight, now),
            lambda: fleet.refused(flight, now),
        ]
        rng.choice(ends)()

    def drop(now: float) -> None:
        if waiting:
            fleet, held = waiting.pop(rng.randrange(len(waiting)))
            fleet.dropped(held, now)

    def first_token(now: float) -> None:
        if flights:
            fleet, flight = rng.choice(flights)
            fleet.first_token(flight, now)

    def carry(now: float) -> None:
        for link in links:
            if rng.random() < 0.7:
                link.under_way.append(link.journal.take())
                if rng.random() < 0.2:  # lost: from here on only a statement helps
                    link.journal.lost(link.under_way.pop())
                    link.lossy = True
            if rng.random() < 0.5:
                link.carry(now)

    now = 0.0
    for _ in range(rng.randrange(10, 120)):
        now += rng.random() * 0.2
        rng.choice((submit, submit, first_token, end, drop, carry, carry))(now)
        for fleet, _ in made:
            fleet.tick(now)
        released()
    while flights or waiting:
        now += 0.5
        for fleet, flight in flights:
            fleet.finished(flight, now)
        flights.clear()
        for link in links:
            link.restate(now)
        for fleet, _ in made:
            fleet.tick(now)
        released()
    for link in links:
        link.restate(now)
    for fleet, journal in made:
        assert nothing(fleet), figures(fleet)
        assert journal.outstanding == 0 and fleet.held == 0
        fleet.index.check_invariants()


def test_a_statement_replaces_what_was_known() -> None:
    here, journal = make_fleet("a")
    there, _ = make_fleet("b")
    flights = [sent(here, name, 100) for name in range(6)]
    there.peers.told("a", journal.take()[:4], 0.0)
    here.first_token(flights[0], 0.5)
    here.finished(flights[1], 0.5)
    restate(there, "a", journal, here, 0.6)
    assert there.peers.outstanding("a") == 5
    assert figures(there) == figures(here)
