"""What other routers tell: ledgers agree in the end, whatever is late or lost; nothing of the dead stays."""

import random

import pytest

from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthState
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import MAX_EVENTS, Journal
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure
from tests.router.two_routers import figures, make_fleet, nothing, prompt, restate, sent


def test_a_request_is_in_the_others_ledger_from_its_dispatch_to_its_end() -> None:
    here, journal = make_fleet("a")
    there, _ = make_fleet("b")
    flight = sent(here, 1, 100)
    there.peers.told("a", journal.take(), 0.01)
    assert figures(there) == figures(here) and there.peers.outstanding("a") == 1
    index = flight.replica.index
    assert there.index.match(prompt(1, 100).keys)[index] == 100, "its blocks will be there"
    here.first_token(flight, 0.5)
    there.peers.told("a", journal.take(), 0.51)
    assert figures(there) == figures(here) and there.replicas[index].ledger.decoding == 1
    here.finished(flight, 1.0, Usage(1_603, 10, 0))
    there.peers.told("a", journal.take(), 1.01)
    assert nothing(there) and there.peers.outstanding("a") == 0


def test_what_was_never_computed_is_not_believed_there_either() -> None:
    here, journal = make_fleet("a")
    there, _ = make_fleet("b")
    flight = sent(here, 1, 100)
    here.failed(flight, 0.1, Failure.CLOSED)
    there.peers.told("a", journal.take(), 0.2)
    assert there.index.match(prompt(1, 100).keys) == [0, 0] and nothing(there)


def test_two_routers_do_not_choose_the_same_idle_replica() -> None:
    here, journal = make_fleet("a")
    there, _ = make_fleet("b")
    flight = sent(here, 1, 500)
    there.peers.told("a", journal.take(), 0.0)
    assert sent(there, 2, 500).replica.index != flight.replica.index


def test_others_prefill_is_not_taken_for_slowness() -> None:
    """Alone it would seem twice as slow: every second request on the replica is another router's."""
    cost_s = 0.2
    factors = []
    for shared in (True, False):
        here, journal = make_fleet("a", replicas=1)
        there, _ = make_fleet("b", replicas=1)
        now = 0.0
        for name in range(100):
            flights = sent(here, 2 * name, 100, now), sent(there, 2 * name + 1, 100, now)
            if shared:
                there.peers.told("a", journal.take(), now)
            here.first_token(flights[0], now + cost_s)
            if shared:
                there.peers.told("a", journal.take(), now + cost_s)
            there.first_token(flights[1], now + 2 * cost_s)
            here.finished(flights[0], now + 2 * cost_s)
            there.finished(flights[1], now + 2 * cost_s)
            now += 1.0
        factors.append(there.replicas[0].cost.prefill_factor)
    assert factors[1] == pytest.approx(2.0 * factors[0], rel=0.1)


def test_what_a_reply_teaches_is_told() -> None:
    here, journal = make_fleet("a", replicas=1)
    there, _ = make_fleet("b", replicas=1)
    for name in range(50):
        flight = sent(here, name, 10, float(name))
        here.first_token(flight, name + 0.1)
        here.finished(flight, name + 0.6, Usage(163, 11, 0))
        there.peers.told("a", journal.take(), name + 0.6)
    assert there.traffic.output_tokens == here.traffic.output_tokens < 256
    assert there.replicas[0].cost.step_s(1) == here.replicas[0].cost.step_s(1)


def test_a_prefix_is_as_hot_for_all_as_all_have_asked_for_it() -> None:
    here, journal = make_fleet("a", replicas=1)
    there, _ = make_fleet("b", replicas=1)
    here.finished(sent(here, 1, 100), 0.0)
    for fraction in range(40):
        sent(here, 1, 100, fraction / 100)
    there.peers.told("a", journal.take(), 0.4)
    prices = [fleet.explain(prompt(1, 100), 0.4)[2].copy_price for fleet in (here, there, make_fleet("c")[0])]
    assert prices[0] == pytest.approx(prices[1], abs=0.1) and prices[0] < 0.9 and prices[2] == 1.0


def test_nothing_is_learned_of_prefill_while_others_work_is_not_heard_of() -> None:
    fleet, _ = make_fleet("a", replicas=1)
    before = fleet.replicas[0].cost.prefill_factor
    fleet.speed.blind = True
    for name in range(50):
        flight = sent(fleet, name, 10, float(name))
        fleet.first_token(flight, name + 0.9)
        fleet.finished(flight, name + 0.95)
    assert fleet.replicas[0].cost.prefill_factor == before
    fleet.speed.blind = False
    flight = sent(fleet, 99, 10, 99.0)
    fleet.first_token(flight, 99.9)
    assert fleet.replicas[0].cost.prefill_factor > before


def exact_fleet(router: str, block_tokens: int = 16) -> tuple[Fleet, Journal]:
    fleet = Fleet(
        [ReplicaSpec("r0", "http://r0", blocks=BlockSettings("warmroute", block_tokens))],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(exact=True),
    )
    fleet.probe_succeeded(0, 0.0)
    journal = fleet.journal = Journal(router, fleet.caches.exact)
    return fleet, journal


def test_prompts_read_token_by_token_are_told_in_their_replicas_naming() -> None:
    here, journal = exact_fleet("a")
    there, _ = exact_fleet("b")
    otherwise, _ = exact_fleet("c", block_tokens=32)
    (naming,) = here.caches.exact.namings
    tokens = range(100)
    read = Prompt(keys=(), units=100, chains={naming: naming.keys(tokens)}, stream=True)
    flight = here.submit(read, 0.0)
    assert isinstance(flight, InFlight)
    events = journal.take()
    for fleet in (there, otherwise):
        fleet.peers.told("a", events, 0.0)
    assert there.caches.levels(read) == here.caches.levels(read) == [(1, 96)]
    (other,) = otherwise.caches.exact.namings
    asked = Prompt(keys=(), units=100, chains={other: other.keys(tokens)})
    assert otherwise.caches.levels(asked) == [], "keys in another naming say nothing"
    here.failed(flight, 0.1, Failure.CLOSED)
    for fleet in (there, otherwise):
        fleet.peers.told("a", events := journal.take() or events, 0.1)
        assert nothing(fleet)
    assert there.caches.levels(read) == []


def test_the_dead_teach_nothing() -> None:
    here, journal = make_fleet("a", replicas=1)
    there, _ = make_fleet("b", replicas=1)
    before = there.replicas[0].cost.prefill_factor
    for name in range(20):
        sent(here, name, 100)
    there.peers.told("a", journal.take(), 0.0)
    there.peers.gone("a", 60.0)
    assert there.replicas[0].cost.prefill_factor == before
    assert all(there.index.match(prompt(name, 100).keys) == [100] for name in range(20)), "blocks stay"


def test_the_dead_hold_nothing() -> None:
    here, journal = make_fleet("a", hold=True)
    there, _ = make_fleet("b", hold=True)
    for name in range(20):
        here.submit(prompt(name, 300), 0.0)
    there.peers.told("a", journal.take(), 0.0)
    mine = [there.submit(prompt(100 + name, 300), 0.0) for name in range(3)]
    assert all(isinstance(one, Held) for one in mine)
    there.peers.gone("a", 5.0)
    assert len(there.outbox) == 2 and there.peers.outstanding("a") == 0, "one on each replica, at once"
    assert sum(r.ledger.queued for r in there.replicas) == 2


def test_one_queue_for_all_routers() -> None:
    """The shortest goes first, whoever holds it; only its router sends it."""
    here, journal = make_fleet("a", replicas=1, hold=True)
    there, other = make_fleet("b", replicas=1, hold=True)
    running = sent(here, 1, 500)
    there.peers.told("a", journal.take(), 0.0)
    here.submit(prompt(2, 400), 0.0, context="long")
    there.submit(prompt(3, 50), 0.0, context="short")
    there.peers.told("a", journal.take(), 0.0)
    here.peers.told("b", other.take(), 0.0)
    assert [len(fleet.replicas[0].held) for fleet in (here, there)] == [2, 2]
    here.first_token(running, 1.0)
    assert not here.outbox, "the other router's goes first"
    there.peers.told("a", journal.take(), 1.0)
    assert [held.context for held in there.outbox] == ["short"]
    here.peers.told("b", other.take(), 1.0)
    assert not here.outbox and len(here.replicas[0].held) == 1
    flight = there.outbox.pop().flight
    assert flight is not None
    there.first_token(flight, 1.1)
    here.peers.told("b", other.take(), 1.1)
    assert [held.context for held in here.outbox] == ["long"]


def test_a_peer_that_does_not_take_its_turn_is_passed_over() -> None:
    here, journal = make_fleet("a", replicas=1, hold=True)
    there, other = make_fleet("b", replicas=1, hold=True)
    running = sent(here, 1, 500)
    there.peers.told("a", journal.take(), 0.0)
    there.submit(prompt(3, 50), 0.0)
    here.peers.told("b", other.take(), 0.0)
    here.submit(prompt(2, 400), 0.0)
    here.first_token(running, 1.0)
    here.tick(1.01)
    assert not here.outbox
    here.tick(1.2)
    assert len(here.outbox) == 1


def test_the_latest_order_about_draining_counts_everywhere() -> None:
    here, journal = make_fleet("a")
    there, other = make_fleet("b")
    here.drained(0, 0.0)
    there.peers.told("a", journal.take(), 0.1)
    assert there.replicas[0].draining and not len(other), "what was heard is not repeated"
    there.drained(0, 0.2, on=False)
    here.peers.told("b", other.take(), 0.3)
    assert not here.replicas[0].draining
    late, _ = make_fleet("c")
    restate(late, "b", other, there, 1.0)
    restate(late, "a", journal, here, 1.0)
    assert not late.replicas[0].draining and late.replicas[0].drain_version == 2


def test_what_a_peer_ejected_is_doubted_and_one_failure_decides() -> None:
    here, journal = make_fleet("a")
    there, _ = make_fleet("b")
    here.probe_failed(0, 0.0, refused=True)
    there.peers.told("a", journal.take(), 0.0)
    assert there.replicas[0].health.state is HealthState.SUSPECT and there.peers.doubted == {"r0"}
    there.probe_failed(0, 0.1)
    assert there.replicas[0].health.state is HealthState.EJECTED


def test_a_lost_cache_is_lost_for_all() -> None:
    here, journal = make_fleet("a", replicas=1)
    there, _ = make_fleet("b", replicas=1)
    flight = sent(here, 1, 100)
    here.finished(flight, 0.5, Usage(1_603, 10, 0))
    flight = sent(here, 1, 100, 1.0)
    there.peers.told("a", journal.take(), 1.0)
    assert there.index.match(prompt(1, 100).keys) == [100]
    here.finished(flight, 1.5, Usage(1_603, 10, 0))
    there.peers.told("a", journal.take(), 1.5)
    assert there.index.match(prompt(1, 100).keys) == [0]


def test_replicas_that_are_not_known_here_are_counted_and_left() -> None:
    here, journal = make_fleet("a", replicas=2)
    there, _ = make_fleet("b", replicas=1)
    flights = [sent(here, name, 100) for name in range(2)]
    there.peers.told("a", journal.take(), 0.0)
    assert there.peers.unknown == 1 and there.peers.outstanding("a") == 1
    for flight in flights:
        here.finished(flight, 1.0)
    there.peers.told("a", journal.take(), 1.0)
    assert nothing(there)


def test_the_journal_is_bounded_and_the_next_statement_makes_up_for_it() -> None:
    here, journal = make_fleet("a", replicas=1)
    there, _ = make_fleet("b", replicas=1)
    for name in range(MAX_EVENTS // 2):
        here.finished(sent(here, name % 50, 3), 0.0)
    assert journal.dropped == 0
    running = sent(here, 7, 50)
    assert len(journal) <= MAX_EVENTS and journal.dropped == MAX_EVENTS
    restate(there, "a", journal, here, 0.0)
    assert figures(there) == figures(here) and there.peers.outstanding("a") == 1
    assert all(there.index.match(prompt(name, 3).keys) == [3] for name in range(50)), "prompts are not lost"
    here.finished(running, 1.0)
    there.peers.told("a", journal.take(), 1.0)
    assert nothing(there)
