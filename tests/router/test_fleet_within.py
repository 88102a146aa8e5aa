"""A request that only some replicas may have, and the replicas that would be next in line for it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.decision import NoReplica, Reason
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.policies import POLICIES
from tests.router.test_fleet_membership import make_fleet, prompt, send


@pytest.mark.parametrize("kind", sorted(POLICIES))
@given(within=st.sets(st.integers(0, 4), min_size=1), model=st.booleans())
def test_nobody_else_gets_it(kind: str, within: set[int], model: bool) -> None:
    fleet = make_fleet(5, kind)
    if model:
        for replica in range(5):
            fleet.models_reported(replica, frozenset({"m"}))
    for number in range(8):
        flight = fleet.submit(prompt(number % 3), 0.0, within=within)
        assert isinstance(flight, InFlight) and flight.decision.replica in within


def test_of_nobody_usable_none_is_chosen() -> None:
    fleet = make_fleet(3)
    fleet.drained(1, 0.0)
    for within in ([1], [], [7]):
        with pytest.raises(NoReplica) as refused:
            fleet.decide(prompt(1), 0.0, within=within)
        assert refused.value.why == "none_usable"
    assert fleet.decide(prompt(1), 0.0, within=[1, 2]).replica == 2


def test_a_restricted_request_does_not_restrict_the_next() -> None:
    fleet = make_fleet(3)
    assert fleet.decide(prompt(1), 0.0, within=[2]).reason is Reason.ONLY
    assert {fleet.decide(prompt(1), 0.0).replica for _ in range(3)} == {0, 1, 2}


def test_one_that_waits_goes_to_nobody_else_when_its_replica_is_drained() -> None:
    fleet = make_fleet(3, "predicted_finish", hold=True)
    for number in range(3):
        send(fleet, prompt(number, 400))
    held = fleet.submit(prompt(9, 400), 0.0, within=[0, 1])
    assert isinstance(held, Held)
    home = held.decision.replica
    fleet.drained(home, 0.0)
    assert held.decision.replica == 1 - home
    fleet.drained(1 - home, 0.0)
    assert fleet.outbox == [held] and held.flight is None


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_the_next_in_line_are_others_each_once_and_asking_changes_nothing(kind: str) -> None:
    fleet, twin = make_fleet(4, kind), make_fleet(4, kind)
    for number in range(6):
        asked = prompt(number % 2)
        flight = send(fleet, asked)
        others = fleet.others(asked, 0.0, chosen=flight.decision.replica, count=5)
        assert sorted([flight.decision.replica, *others]) == [0, 1, 2, 3]
        assert send(twin, asked).decision == flight.decision


def test_the_next_in_line_is_who_would_be_chosen_then() -> None:
    fleet = make_fleet(3, "prefix_affinity")
    for replica in (2, 1):
        known = prompt(1, 40 if replica == 2 else 20)
        fleet.finished(fleet.sent(known, fleet.decide(known, 0.0, within=[replica]), 0.0), 0.0)
    assert fleet.decide(prompt(1), 0.0).replica == 2
    assert fleet.others(prompt(1), 0.0, chosen=2, count=1) == [1], "it holds half of it"
    assert fleet.others(prompt(1), 0.0, chosen=2, count=1, within=[0, 2]) == [0]
    assert fleet.others(prompt(1), 0.0, chosen=2, count=1, within=[2]) == []
