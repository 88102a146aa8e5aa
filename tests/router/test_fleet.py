"""The fleet's events: what each one changes, and that a request's end leaves nothing behind."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.load_report import LoadReport
from router.routing.decision import Reason
from router.routing.in_flight import Usage
from router.routing.ledger import Booking
from router.routing.policies import POLICIES
from router.routing.retry import Failure
from tests.router.small_fleet import BLOCK, at, at_rest, make_fleet, prompt, send


def test_the_second_turn_goes_where_the_first_went() -> None:
    fleet = make_fleet()
    first = send(fleet, prompt(*range(40)), 0.0)
    fleet.first_token(first, 0.2)
    fleet.finished(first, 1.0, Usage(643, 20, 0))
    decision = fleet.decide(prompt(*range(60)), 2.0)
    assert decision.replica == first.replica.index and decision.reason is Reason.WARM
    assert decision.matched_tokens == 40 * BLOCK
    assert decision.saved_s > 0


def test_a_burst_with_one_prefix_spreads_because_its_work_is_booked() -> None:
    fleet = make_fleet(4)
    used = {send(fleet, prompt(*range(300), 1000 + k), 0.0).replica.index for k in range(60)}
    assert len(used) == 4


def test_deciding_changes_nothing() -> None:
    fleet = make_fleet()
    send(fleet, prompt(*range(10)), 0.0)
    before = [(r.ledger.queued, r.ledger.backlog_s(0.0), fleet.index.held(r.index)) for r in fleet.replicas]
    for _ in range(20):
        fleet.decide(prompt(*range(30)), 0.0)
        fleet.explain(prompt(*range(30)), 0.0)
    assert before == [
        (r.ledger.queued, r.ledger.backlog_s(0.0), fleet.index.held(r.index)) for r in fleet.replicas
    ]


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_explaining_names_the_next_decision_and_changes_nothing(kind: str) -> None:
    fleet = make_fleet(4, kind)
    for name in range(6):
        asked = prompt(name)
        for _ in range(3):
            told = fleet.explain(asked, 0.0)[0]
        assert fleet.decide(asked, 0.0) == told
        send(fleet, asked, 0.0)


def test_a_failed_request_leaves_no_credit() -> None:
    fleet = make_fleet(1)
    flight = send(fleet, prompt(*range(20)), 0.0)
    fleet.failed(flight, 0.1, Failure.STATUS_5XX)
    assert fleet.index.held(0) == 0 and at_rest(fleet)


def test_a_cancelled_request_keeps_the_credit_it_found() -> None:
    fleet = make_fleet(1)
    done = send(fleet, prompt(*range(10)), 0.0)
    fleet.first_token(done, 0.1)
    fleet.finished(done, 0.2, Usage(163, 5, 0))
    flight = send(fleet, prompt(*range(30)), 1.0)
    fleet.cancelled(flight, 1.1)
    assert fleet.index.match(prompt(*range(30)).keys) == [10]


def test_capacity_bounds_what_is_believed() -> None:
    fleet = make_fleet(1)
    fleet.load_reported(0, LoadReport(capacity_tokens=10 * BLOCK), 0.0)
    for number in range(10):
        send(fleet, prompt(*range(10 * number, 10 * number + 4)), 0.0)
    assert 8 * BLOCK <= fleet.index.held(0) <= 10 * BLOCK


def test_a_refused_prompt_leaves_neither_load_nor_a_hole_in_the_index() -> None:
    """Too long for the context and refused at once: nothing was computed, nothing evicted for it."""
    fleet = make_fleet(2)
    fleet.load_reported(0, LoadReport(capacity_tokens=2_000 * BLOCK), 0.0)
    fleet.load_reported(1, LoadReport(capacity_tokens=2_000 * BLOCK), 0.0)
    known = send(fleet, prompt(*range(40)), 0.0)
    fleet.first_token(known, 0.1)
    fleet.finished(known, 0.2, Usage(643, 5, 0))
    home = known.replica
    loads = [replica.ledger.load for replica in fleet.replicas]
    for number in range(3):
        asked = prompt(*range(10_000 * number + 1_000, 10_000 * number + 21_000))
        refused = fleet.sent(asked, at(home.index, fleet.decide(asked, 1.0)), 1.0)
        assert home.ledger.load > 0.05
        fleet.refused(refused, 1.01)
    assert [replica.ledger.load for replica in fleet.replicas] == pytest.approx(loads, abs=5e-3)
    assert fleet.decide(prompt(*range(40), 50), 1.1).reason is Reason.WARM


def test_idle_replicas_that_are_alike_share_cold_requests() -> None:
    """One at a time, for ever: what was learned of each differs by a few percent."""
    fleet = make_fleet(4)
    counts = [0, 0, 0, 0]
    for number in range(400):
        flight = send(fleet, prompt(*range(100 * number, 100 * number + 30)), float(number))
        replica = flight.replica.index
        counts[replica] += 1
        fleet.first_token(flight, number + 0.030 + 0.0003 * replica)
        fleet.finished(flight, number + 0.5, Usage(483, 10, 0))
    assert min(counts) > 60


def test_a_request_that_is_not_streamed_leaves_the_queue_when_predicted() -> None:
    fleet = make_fleet(1)
    flight = send(fleet, prompt(*range(100), stream=False), 0.0)
    predicted = flight.decision.prefill_s
    fleet.decide(prompt(1), predicted * 0.9)
    assert fleet.replicas[0].ledger.queued == 1
    fleet.decide(prompt(1), predicted * 1.1)
    assert (fleet.replicas[0].ledger.queued, fleet.replicas[0].ledger.decoding) == (0, 1)
    fleet.finished(flight, 3.0)
    assert at_rest(fleet)


events = st.lists(
    st.tuples(
        st.sampled_from(["send", "first", "finish", "fail", "refuse", "cancel", "drop", "probe"]),
        st.integers(0, 50),
        st.floats(0, 0.5),
    ),
    max_size=60,
)


@given(script=events, kind=st.sampled_from(sorted(POLICIES)))
@settings(deadline=None, max_examples=80)
def test_K01_whatever_happens_every_counter_returns_to_zero(
    script: list[tuple[str, int, float]], kind: str
) -> None:
    fleet, flights, now = make_fleet(3, kind), [], 0.0
    failures = list(Failure)
    for action, which, pause in script:
        now += pause
        if action == "send":
            asked = prompt(*range(which % 7), which, stream=bool(which % 2))
            flights.append(fleet.sent(asked, fleet.decide(asked, now), now))
        elif action == "probe":
            fleet.probe_succeeded(which % 3, now)
        elif flights:
            flight = flights[which % len(flights)]
            if action == "first":
                fleet.first_token(flight, now)
            elif action == "finish":
                fleet.finished(flight, now, Usage(100, 10, which))
            elif action == "fail":
                fleet.failed(flight, now, failures[which % len(failures)])
            elif action == "refuse":
                fleet.refused(flight, now)
            elif action == "cancel":
                fleet.cancelled(flight, now)
        live = [f for f in flights if not f.over]
        assert sum(r.in_flight for r in fleet.replicas) == len(live)
        queued = [f for f in live if f.booking.state == Booking.QUEUED]
        assert sum(r.ledger.queued for r in fleet.replicas) == len(queued)
        fleet.index.check_invariants()
    for flight in flights:
        fleet.cancelled(flight, now)
    assert at_rest(fleet)
