"""Who of a fleet gets work: the dead, the busy, those on probation, draining or of another model."""

import pytest

from router.routing.decision import NoReplica, Reason
from router.routing.retry import Failure
from tests.router.small_fleet import at_rest, make_fleet, prompt, send


def test_a_dead_replica_is_out_at_once_and_its_cache_with_it() -> None:
    fleet = make_fleet(2, "round_robin")
    flight = send(fleet, prompt(*range(20)), 0.0)
    dead = flight.replica.index
    fleet.failed(flight, 0.1, Failure.CONNECT)
    assert fleet.index.held(dead) == 0
    assert {fleet.decide(prompt(1), 0.2).replica for _ in range(4)} == {1 - dead}
    fleet.probe_succeeded(dead, 0.5)  # its back-off is not over
    assert {fleet.decide(prompt(1), 0.6).replica for _ in range(4)} == {1 - dead}
    fleet.probe_succeeded(dead, 2.0)
    assert {fleet.decide(prompt(1), 2.1).replica for _ in range(4)} == {0, 1}


def test_probation_lets_one_request_in() -> None:
    fleet = make_fleet(2, "round_robin")
    fleet.probe_failed(0, 0.0, refused=True)
    fleet.probe_succeeded(0, 5.0)
    trial = next(f for f in (send(fleet, prompt(1), 5.0) for _ in range(4)) if f.replica.index == 0)
    assert {fleet.decide(prompt(1), 5.1).replica for _ in range(4)} == {1}
    fleet.finished(trial, 5.5)
    assert {fleet.decide(prompt(1), 5.6).replica for _ in range(4)} == {0, 1}


def test_busy_is_not_broken() -> None:
    fleet = make_fleet(1)
    for _ in range(5):
        fleet.failed(send(fleet, prompt(1), 0.0), 0.0, Failure.BUSY)
    assert fleet.replicas[0].usable and at_rest(fleet)


def test_the_clients_fault_is_not_the_replicas() -> None:
    fleet = make_fleet(1)
    for _ in range(5):
        fleet.refused(send(fleet, prompt(*range(9)), 0.0), 0.0)
    assert fleet.replicas[0].usable and fleet.index.held(0) == 0


def test_draining_takes_no_new_work_and_ends() -> None:
    fleet = make_fleet(2, "round_robin")
    fleet.drained(0, 0.0)
    assert {fleet.decide(prompt(1), 0.0).replica for _ in range(4)} == {1}
    fleet.drained(1, 0.0)
    with pytest.raises(NoReplica) as caught:
        fleet.decide(prompt(1), 0.0)
    assert caught.value.why == "none_usable"
    fleet.drained(0, 0.0, on=False)
    assert fleet.decide(prompt(1), 0.0).replica == 0


def test_all_ejected_is_a_panic_not_a_refusal() -> None:
    fleet = make_fleet(2)
    for replica in range(2):
        fleet.probe_failed(replica, 0.0, refused=True)
    assert not fleet.ready
    assert fleet.decide(prompt(1), 0.1).reason is Reason.PANIC


def test_a_retry_goes_elsewhere_or_nowhere() -> None:
    fleet = make_fleet(2)
    decision = fleet.decide(prompt(1), 0.0, tried={0})
    assert (decision.replica, decision.reason) == (1, Reason.RETRY)
    with pytest.raises(NoReplica):
        fleet.decide(prompt(1), 0.0, tried={0, 1})


def test_models_part_the_fleet() -> None:
    fleet = make_fleet(3, "round_robin")
    fleet.models_reported(0, frozenset({"a"}))
    fleet.models_reported(1, frozenset({"b"}))
    fleet.models_reported(2, frozenset({"a", "b"}))
    assert {fleet.decide(prompt(1, model="a"), 0.0).replica for _ in range(6)} == {0, 2}
    with pytest.raises(NoReplica) as caught:
        fleet.decide(prompt(1, model="c"), 0.0)
    assert caught.value.why == "unknown_model"
    fleet.probe_failed(0, 0.0, refused=True)
    fleet.probe_failed(2, 0.0, refused=True)
    assert fleet.decide(prompt(1, model="a"), 0.0).reason is Reason.PANIC, "known, though down"


def test_a_replica_that_was_never_reached_makes_no_unknown_model_known() -> None:
    fleet = make_fleet(2, "round_robin")
    fleet.models_reported(0, frozenset({"a"}))
    fleet.probe_failed(1, 0.0, refused=True)
    with pytest.raises(NoReplica) as caught:
        fleet.decide(prompt(1, model="c"), 0.0)
    assert caught.value.why == "unknown_model"
    assert fleet.decide(prompt(1, model="a"), 0.0).replica == 0
    fleet.probe_failed(0, 0.0, refused=True)
    assert fleet.decide(prompt(1, model="c"), 0.0).reason is Reason.PANIC, "nobody is there who could tell"


def test_explaining_says_that_all_replicas_are_out() -> None:
    fleet = make_fleet(2)
    for replica in (0, 1):
        fleet.probe_failed(replica, 1.0, refused=True)
    assert fleet.explain(prompt(1), 1.0)[0].reason is Reason.PANIC
    assert fleet.decide(prompt(1), 1.0).reason is Reason.PANIC
