"""The fleet's events: what each one changes, and that a request's end leaves nothing behind."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.load_report import LoadReport
from router.routing.decision import Decision, NoReplica, Reason
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthSettings
from router.routing.in_flight import InFlight, Usage
from router.routing.ledger import Booking
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure

BLOCK = 16


def make_fleet(replicas: int = 3, kind: str = "predicted_finish", **settings_: object) -> Fleet:
    specs = [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(replicas)]
    rng = random.Random(1)
    settings_.setdefault("health", HealthSettings(failures_to_eject=2, backoff_s=1.0))
    fleet = Fleet(
        specs,
        POLICIES[kind](rng),
        FleetSettings(**settings_),  # type: ignore[arg-type]
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


def prompt(*blocks: int, tail: int = 3, stream: bool = True, model: str | None = None) -> Prompt:
    keys, parent = [], 1
    for block in blocks:
        parent = hash((parent, block)) & 0xFFFF_FFFF_FFFF_FFFF
        keys.append(parent)
    return Prompt(
        keys=keys, units=len(keys) * BLOCK + tail, layout=UniformLayout(BLOCK), stream=stream, model=model
    )


def send(fleet: Fleet, asked: Prompt, now: float) -> InFlight:
    return fleet.sent(asked, fleet.decide(asked, now), now)


def at(replica: int, decision: Decision) -> Decision:
    """The same decision for another replica."""
    return Decision(
        replica,
        decision.reason,
        decision.matched_tokens,
        decision.wait_s,
        decision.prefill_s,
        decision.saved_s,
    )


def at_rest(fleet: Fleet) -> bool:
    return all(
        (r.ledger.queued, r.ledger.decoding, r.ledger.outstanding_tokens, r.in_flight) == (0, 0, 0, 0)
        and r.ledger.backlog_s(1e9) == 0.0
        for r in fleet.replicas
    )


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


def test_explaining_says_that_all_replicas_are_out() -> None:
    fleet = make_fleet(2)
    for replica in (0, 1):
        fleet.probe_failed(replica, 1.0, refused=True)
    assert fleet.explain(prompt(1), 1.0)[0].reason is Reason.PANIC
    assert fleet.decide(prompt(1), 1.0).reason is Reason.PANIC


def test_capacity_follows_what_a_byte_is_learned_to_be() -> None:
    fleet = make_fleet(1)
    ratio = fleet.caches.token_ratio
    fleet.load_reported(0, LoadReport(capacity_tokens=1_000), 0.0)
    assert fleet.index.capacity(0) == 1_000
    for _ in range(400):
        ratio.learn(prompt_tokens=500, units=1_000)
    fleet.load_reported(0, LoadReport(capacity_tokens=1_000), 1.0)
    assert fleet.index.capacity(0) == pytest.approx(2_000, rel=0.1)


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
