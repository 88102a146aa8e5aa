"""Health's table of transitions; what may be tried again."""

import pytest

from router.routing.health import Health, HealthSettings, HealthState
from router.routing.retry import Failure, RetryBudget, RetrySettings
from tests.router.small_fleet import make_fleet, prompt

SETTINGS = HealthSettings(failures_to_eject=3, probe_failures_to_eject=2, backoff_s=1.0, max_backoff_s=4.0)


def test_a_success_forgives_failures_in_between() -> None:
    health = Health(SETTINGS)
    for _ in range(10):
        health.request_failed(0.0)
        health.request_failed(0.0)
        assert health.state is HealthState.SUSPECT
        health.request_succeeded()
        assert health.state is HealthState.HEALTHY


@pytest.mark.parametrize("failures", [1, 2])
def test_exactly_the_configured_number_ejects(failures: int) -> None:
    health = Health(HealthSettings(failures_to_eject=failures))
    for made in range(1, failures + 1):
        assert health.state is not HealthState.EJECTED, made
        health.request_failed(0.0)
    assert health.state is HealthState.EJECTED


def test_one_failed_probe_is_no_reason() -> None:
    health = Health(SETTINGS)
    health.probe_failed(0.0)
    health.probe_succeeded(0.1)
    health.probe_failed(0.2)
    assert health.state is HealthState.HEALTHY
    health.probe_failed(0.3)
    assert health.state is HealthState.EJECTED


def test_backoff_doubles_up_to_its_limit_and_resets_on_success() -> None:
    health, now, waits = Health(SETTINGS), 0.0, []
    for _ in range(5):
        health.connect_failed(now)
        start = now
        while health.state is HealthState.EJECTED:
            now += 0.25
            health.probe_succeeded(now)
        waits.append(now - start)
        assert health.state is HealthState.PROBATION
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]
    health.request_succeeded()
    health.connect_failed(now)
    health.probe_succeeded(now + 1.0)
    assert health.state is HealthState.PROBATION


def test_an_answer_from_an_ejected_replica_does_not_bring_it_back() -> None:
    health = Health(SETTINGS)
    health.connect_failed(0.0)
    health.request_succeeded()  # one that was in flight
    assert health.state is HealthState.EJECTED


def test_unreachable_is_who_does_not_answer_and_until_it_does() -> None:
    """Failed requests say nothing of that: whoever answers them with an error is there."""
    health = Health(HealthSettings(failures_to_eject=1, probe_failures_to_eject=2, backoff_s=1.0))
    health.request_failed(0.0)
    assert health.state is HealthState.EJECTED and not health.unreachable
    for silent in (lambda: [health.probe_failed(5.0) for _ in range(2)], lambda: health.connect_failed(5.0)):
        silent()
        assert health.unreachable
        health.probe_succeeded(5.1)  # too early to come back, but it is there
        assert health.state is HealthState.EJECTED and not health.unreachable


def test_probation_ends_with_the_first_failure() -> None:
    health = Health(SETTINGS)
    health.connect_failed(0.0)
    health.probe_succeeded(1.0)
    health.request_failed(1.1)
    assert health.state is HealthState.EJECTED


@pytest.mark.parametrize("failure", [Failure.BROKEN, Failure.FIRST_BYTE_TIMEOUT])
def test_never_after_the_first_byte_nor_when_the_work_may_be_running(failure: Failure) -> None:
    assert not RetryBudget(RetrySettings()).take(failure, 1)


@pytest.mark.parametrize("attempts", [1, 2])
def test_attempts_are_bounded(attempts: int) -> None:
    budget = RetryBudget(RetrySettings(attempts=attempts))
    granted = [budget.take(Failure.CONNECT, made) for made in (1, 2, 3)]
    assert granted == [made < attempts for made in (1, 2, 3)]


def test_in_a_brown_out_retries_are_a_share_of_the_traffic() -> None:
    budget = RetryBudget(RetrySettings(attempts=3, budget_share=0.2, budget_floor=10))
    granted = 0
    for _ in range(1_000):
        budget.earn()
        granted += budget.take(Failure.STATUS_5XX, 1)
    assert granted == pytest.approx(210, abs=2)


def test_connections_never_made_cost_no_budget() -> None:
    budget = RetryBudget(RetrySettings(budget_floor=1))
    assert all(budget.take(Failure.CONNECT, 1) for _ in range(100))
    assert budget.take(Failure.CLOSED, 1) and not budget.take(Failure.CLOSED, 1)


def test_a_busy_replica_gets_nothing_until_its_time_is_over_while_another_can_take_it() -> None:
    fleet = make_fleet(2, "round_robin")

    def turned_away(now: float, replica: int, rest_s: float) -> None:
        flight = fleet.sent(prompt(1), fleet.decide(prompt(1), now, within={replica}), now)
        fleet.failed(flight, now, Failure.BUSY, rest_s)

    def asked(now: float) -> set[int]:
        fleet.rested(now)
        return {fleet.decide(prompt(2), now).replica for _ in range(4)}

    turned_away(10.0, 0, 5.0)
    turned_away(11.0, 0, 2.0)  # the longer of both counts
    assert asked(14.9) == {1}
    assert asked(15.0) == {0, 1}
    turned_away(20.0, 0, 5.0)
    turned_away(20.0, 1, 9.0)
    assert asked(21.0) == {0, 1}  # both are busy
    assert asked(25.0) == {0}
    fleet.replica_removed(1, 26.0)
    fleet.forget_departed()
    assert asked(29.0) == {0}
