"""What a fleet learns from answers: whose cache is gone, how fast replicas are, what a byte is in tokens."""

import pytest

from replica.contract.load_report import LoadReport
from router.routing.in_flight import Usage
from tests.router.small_fleet import BLOCK, at, make_fleet, prompt, send


def test_nothing_cached_where_much_was_believed_takes_the_credit_away() -> None:
    fleet = make_fleet(1)
    for base in (0, 1_000, 2_000):
        flight = send(fleet, prompt(*range(base, base + 40)), 0.0)
        fleet.first_token(flight, 0.1)
        fleet.finished(flight, 0.2, Usage(643, 5, 0))
    flight = send(fleet, prompt(*range(45)), 1.0)  # the replica has restarted meanwhile
    fleet.first_token(flight, 1.1)
    fleet.finished(flight, 1.2, Usage(723, 5, 0))
    assert fleet.index.held(0) == 45 * BLOCK, "only what has just been computed is believed"


def test_a_request_that_overtakes_the_one_it_shares_with_is_no_restart() -> None:
    """Both were sent before either was computed, the replica took the second one first."""
    fleet = make_fleet(1)
    known = send(fleet, prompt(*range(1_000, 1_040)), 0.0)
    fleet.first_token(known, 0.1)
    fleet.finished(known, 0.2, Usage(643, 5, 0))
    first, second = send(fleet, prompt(*range(40)), 1.0), send(fleet, prompt(*range(40), 77), 1.0)
    assert second.decision.matched_tokens == 40 * BLOCK
    fleet.first_token(second, 1.1)
    fleet.finished(second, 1.2, Usage(659, 5, 0))
    fleet.first_token(first, 1.3)
    fleet.finished(first, 1.4, Usage(643, 5, 640))
    assert fleet.index.match(prompt(*range(1_000, 1_040)).keys) == [40]


def test_eight_answers_in_a_row_without_a_hit_are_a_restart_however_busy_the_replica() -> None:
    fleet = make_fleet(1)
    known = send(fleet, prompt(*range(1_000, 1_040)), 0.0)
    fleet.first_token(known, 0.1)
    fleet.finished(known, 0.2, Usage(643, 5, 0))
    busy = send(fleet, prompt(5_000), 0.9)
    for n in range(8):
        assert fleet.index.match(prompt(*range(1_000, 1_040)).keys) == [40]
        flight = send(fleet, prompt(*range(1_000, 1_040), 2_000 + n), 1.0 + n)
        fleet.first_token(flight, 1.1 + n)
        fleet.finished(flight, 1.2 + n, Usage(659, 5, 0))
    assert fleet.index.match(prompt(*range(1_000, 1_040), 2_000).keys) == [40]  # the last one's own blocks
    assert fleet.index.held(0) == 41 * BLOCK
    fleet.cancelled(busy, 20.0)


@pytest.mark.parametrize(
    ("questions", "more_homes"),
    [
        (60, True),  # all begin with one document
        (5, True),  # each question is asked by few, their document by all
        (0, False),  # three requests in a second are not more than one replica can do
    ],
)
def test_a_hot_prefix_gets_more_homes_and_a_cold_one_does_not(questions: int, more_homes: bool) -> None:
    fleet = make_fleet(4)
    document = range(600)
    for n in range(max(1, questions)):
        warm = fleet.sent(asked := prompt(*document, 1_000 + n), at(0, fleet.decide(asked, 0.0)), 0.0)
        fleet.first_token(warm, 1.0)
        fleet.finished(warm, 1.1, Usage(9_619, 5, 0 if n == 0 else 9_600))
    for _ in range(200):  # arrivals that make a copy dear
        fleet.traffic.arrived(1.9, 0.5)
    homes = set()
    for n in range(60):
        about_it = questions or not n % 20
        blocks = (*document, 1_000 + n % (questions or 1)) if about_it else (7_000 + n,)
        flight = send(fleet, prompt(*blocks, *range(2_000 + 40 * n, 2_020 + 40 * n)), 2.0 + n / 60)
        if about_it:
            homes.add(flight.decision.replica)
    assert (len(homes) > 1) is more_homes


def test_a_replica_that_was_slow_for_a_moment_is_tried_again() -> None:
    """One request every ten seconds: the fast replica could do all of them for ever."""
    fleet = make_fleet(2)
    slow_until, now, name = 100.0, 0.0, 0
    chosen: list[int] = []
    while now < 1_500.0:
        now, name = now + 10.0, name + 1
        flight = send(fleet, prompt(*range(100 * name, 100 * name + 60)), now)
        replica = flight.replica.index
        took_s = 2.0 if replica == 0 and now < slow_until else 0.2
        fleet.first_token(flight, now + took_s)
        fleet.finished(flight, now + took_s + 0.5, Usage(963, 20, 0))
        chosen.append(replica)
    assert 0 in chosen[:10], "it was never seen slow"
    assert 0 not in chosen[12:18], "it is avoided while that is fresh"
    assert chosen[-50:].count(0) >= 3, "and takes part again once it is not"


def test_capacity_follows_what_a_byte_is_learned_to_be() -> None:
    fleet = make_fleet(1)
    ratio = fleet.caches.token_ratio
    fleet.load_reported(0, LoadReport(capacity_tokens=1_000), 0.0)
    assert fleet.index.capacity(0) == 1_000
    for _ in range(400):
        ratio.learn(prompt_tokens=500, units=1_000)
    fleet.load_reported(0, LoadReport(capacity_tokens=1_000), 1.0)
    assert fleet.index.capacity(0) == pytest.approx(2_000, rel=0.1)


def test_prefill_speed_is_learned_per_replica() -> None:
    fleet = make_fleet(2, "round_robin")
    now, fresh = 0.0, 0
    for _ in range(100):
        fresh += 100
        flight = send(fleet, prompt(*range(fresh, fresh + 60)), now)
        slow = 3.0 if flight.replica.index else 1.0
        now += flight.booking.prior_s * slow
        fleet.first_token(flight, now)
        now += 0.01
        fleet.finished(flight, now, Usage(963, 2, 0))
    one, other = fleet.replicas[0].cost, fleet.replicas[1].cost
    assert one.prefill_factor == pytest.approx(1.0, rel=0.05)
    assert other.prefill_factor == pytest.approx(3.0, rel=0.1)


def test_answers_that_are_not_streamed_teach_that_prefill_is_fast() -> None:
    """A replica much faster than the prior, no streams: predictions must come down all the same."""
    fleet, now = make_fleet(1), 0.0
    for name in range(60):
        flight = send(fleet, prompt(*range(name * 100, name * 100 + 60), stream=False), now)
        now += 0.002
        fleet.finished(flight, now, Usage(963, 1, 0))
        now += 1.0
    assert fleet.replicas[0].cost.prefill_s(963, 0) < 0.003


def test_a_cold_start_on_slow_replicas_does_not_pile_up() -> None:
    """Prefill a hundred times slower than the prior, one popular prefix, nothing learned yet."""
    fleet = make_fleet(3)
    for second in range(12):
        now = second * 0.3
        fleet.sent(
            prompt(*range(50), 1_000 + second), fleet.decide(prompt(*range(50), 1_000 + second), now), now
        )
    assert max(replica.ledger.queued for replica in fleet.replicas) <= 6
