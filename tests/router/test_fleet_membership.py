"""Replicas that join and leave a fleet, and other rules for it, while requests are under way."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.block_source import BlockSettings
from router.routing.decision import NoReplica, Reason
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthState
from router.routing.in_flight import InFlight, Usage
from router.routing.peer_events import PromptStored
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure
from router.state.knowledge import taken_in, written_down

BLOCK = 16


def spec(number: int, weight: float = 1.0, model: str | None = None) -> ReplicaSpec:
    return ReplicaSpec(
        f"r{number}", f"http://r{number}", model, weight, blocks=BlockSettings("warmroute", BLOCK)
    )


def make_fleet(replicas: int = 2, kind: str = "round_robin", *, hold: bool = False) -> Fleet:
    fleet = Fleet(
        [spec(number) for number in range(replicas)],
        POLICIES[kind](random.Random(1)),
        FleetSettings(hold=hold, exact=True),
        rng=random.Random(2),
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


def prompt(name: int, blocks: int = 40, *, exact: bool = False) -> Prompt:
    keys = [name * 1_000 + block + 1 for block in range(blocks)]
    return Prompt(
        keys=keys,
        units=blocks * BLOCK + 3,
        layout=UniformLayout(BLOCK),
        stream=True,
        chains={NAMING: keys} if exact else None,
    )


(NAMING,) = make_fleet().caches.exact.namings


def send(fleet: Fleet, asked: Prompt, now: float = 0.0) -> InFlight:
    return fleet.sent(asked, fleet.decide(asked, now), now)


def chosen(fleet: Fleet, requests: int = 40) -> set[str]:
    return {fleet.replicas[fleet.decide(prompt(k), 0.0).replica].name for k in range(requests)}


def test_who_joins_gets_work_once_a_probe_found_it_well() -> None:
    fleet = make_fleet(1)
    added = fleet.replica_added(spec(1))
    assert added.health.state is HealthState.UNKNOWN and chosen(fleet) == {"r0"}
    fleet.probe_succeeded(added.index, 1.0)
    assert added.health.state is HealthState.HEALTHY and chosen(fleet) == {"r0", "r1"}


def test_who_joins_and_does_not_answer_is_ejected_at_once() -> None:
    fleet = make_fleet(1)
    added = fleet.replica_added(spec(1))
    fleet.probe_failed(added.index, 1.0)
    assert added.health.state is HealthState.EJECTED and chosen(fleet) == {"r0"}


def test_who_is_removed_finishes_what_it_has_and_is_forgotten_then() -> None:
    fleet = make_fleet(2)
    flights = [send(fleet, prompt(1, exact=exact)) for exact in (False, True) for _ in range(2)]
    leaving = [flight for flight in flights if flight.replica.index == 1]
    assert len(leaving) == 2 and fleet.index.held(1)
    fleet.replica_removed(1, 1.0)
    assert chosen(fleet) == {"r0"} and fleet.forget_departed() == []
    fleet.first_token(leaving[0], 2.0)
    fleet.finished(leaving[0], 3.0, Usage(643, 5, 0))
    assert fleet.forget_departed() == []
    fleet.failed(leaving[1], 4.0, Failure.CONNECT)
    assert [replica.name for replica in fleet.forget_departed()] == ["r1"]
    assert [replica.name for replica in fleet.replicas] == ["r0"]
    assert fleet.index.held(1) == 0 and fleet.caches.exact.told.held(1) == 0
    assert fleet.caches.exact.told.expected() == sum(
        len(f.expectation.told) for f in flights if f.expectation is not None and not f.over
    )
    fleet.index.check_invariants()
    fleet.caches.exact.check_invariants()


def test_a_freed_index_is_given_again_and_nothing_is_inherited() -> None:
    fleet = make_fleet(3)
    over = send(fleet, prompt(1))
    fleet.first_token(over, 5.0)
    fleet.finished(over, 6.0, Usage(643, 50, 0))
    fleet.replica_removed(over.replica.index, 6.0)
    fleet.forget_departed()
    added = fleet.replica_added(spec(9))
    assert added.index == over.replica.index and fleet.replicas.slots == 3
    assert added.requests == 0 and added.cost.prefills_seen == 0
    fleet.probe_succeeded(added.index, 7.0)
    assert all(level[0] >> added.index & 1 == 0 for level in fleet.caches.levels(prompt(1)))
    assert [replica.index for replica in fleet.replicas] == [0, 1, 2]
    assert chosen(fleet) == {"r9", "r1", "r2"}


def test_a_naming_nobody_has_any_more_is_not_hashed_for() -> None:
    fleet = make_fleet(1)
    other = fleet.replica_added(
        ReplicaSpec("other", "http://other", blocks=BlockSettings("sha256_cbor", 32, "0"))
    )
    assert len(fleet.caches.exact.namings) == 2
    fleet.replica_removed(other.index, 0.0)
    fleet.forget_departed()
    assert len(fleet.caches.exact.namings) == 1


def test_held_requests_of_a_removed_replica_go_elsewhere() -> None:
    fleet = make_fleet(2, "predicted_finish", hold=True)
    made = [fleet.submit(prompt(1, 400), 0.0) for _ in range(8)]
    home = fleet.replicas[made[0].decision.replica]
    waiting = len(home.held)
    assert waiting
    fleet.replica_removed(home.index, 0.1)
    other = 1 - home.index
    assert not home.held and fleet.held == len(fleet.replicas[other].held)
    assert {held.flight.replica.index for held in fleet.outbox if held.flight} <= {other}
    assert len(fleet.outbox) + fleet.held >= waiting


def test_the_last_one_removed_leaves_nobody() -> None:
    fleet = make_fleet(1)
    fleet.replica_removed(0, 0.0)
    assert fleet.forget_departed() and len(fleet.replicas) == 0 and not fleet.ready
    with pytest.raises(NoReplica, match="no replica can take"):
        fleet.decide(prompt(1), 0.0)


def test_arrivals_and_utilization_are_shared_by_those_that_get_work() -> None:
    def figures(fleet: Fleet) -> tuple[float, float]:
        _, _, request = fleet.explain(prompt(2), 10.0)
        return request.arrivals_per_replica_s, request.fleet_utilization

    alone, drained, removed, ejected = (make_fleet(1) for _ in range(4))
    for fleet in (drained, removed, ejected):
        fleet.probe_succeeded(fleet.replica_added(spec(1)).index, 0.0)
    drained.drained(1, 0.0)
    removed.replica_removed(1, 0.0)
    ejected.probe_failed(1, 0.0, refused=True)
    for fleet in (alone, drained, removed, ejected):
        for _ in range(20):
            send(fleet, prompt(1), 9.9)
    assert figures(drained) == figures(removed) == figures(ejected) == figures(alone)
    ejected.probe_succeeded(1, 9.9)  # back from ejection: it counts again
    assert figures(ejected)[0] == figures(alone)[0] / 2


def test_in_a_large_fleet_nobody_who_has_left_is_drawn() -> None:
    fleet = make_fleet(60, "predicted_finish")
    for replica in range(0, 60, 2):
        fleet.replica_removed(replica, 0.0)
    assert len(fleet.forget_departed()) == 30
    for number in range(60, 70):
        fleet.probe_succeeded(fleet.replica_added(spec(number)).index, 0.0)
    flights = [send(fleet, prompt(k)) for k in range(300)]
    assert {flight.replica.name for flight in flights} == {replica.name for replica in fleet.replicas}


def test_what_is_said_of_a_replica_can_change() -> None:
    fleet = make_fleet(2)
    running = send(fleet, prompt(1))
    fleet.replica_respecified(0, spec(0, weight=3.0, model="m"))
    assert fleet.replicas[0].weight == 3.0 and fleet.replicas[0].models == {"m"}
    assert fleet.replicas[0].in_flight == 1 and not running.over
    asked = prompt(2)
    asked.model = "other"
    assert {fleet.decide(asked, 0.0).replica for _ in range(4)} == {1}


def test_another_policy_and_settings_keep_what_was_learned() -> None:
    fleet = make_fleet(2, "predicted_finish", hold=True)
    flights = [fleet.submit(prompt(1, 400), 0.0) for _ in range(6)]
    assert fleet.held
    price, held = fleet.traffic.decode_price, fleet.held
    fleet.reconfigured(
        POLICIES["round_robin"](random.Random(1)),
        {},
        FleetSettings(slo_ttft_s=2.0, exact=True, default_capacity_tokens=BLOCK * 10),
    )
    assert fleet.traffic.decode_price > price and fleet.held == held
    assert fleet.decide(prompt(3), 0.0).reason is Reason.BALANCED
    assert fleet.index.capacity(0) == BLOCK * 10 >= fleet.index.held(0)
    now = 1.0
    live = [flight for flight in flights if isinstance(flight, InFlight)]
    while live:  # those that were held go out, one after the other
        flight = live.pop()
        fleet.first_token(flight, now)
        fleet.finished(flight, now)
        live += [one.flight for one in fleet.outbox if one.flight is not None]
        fleet.outbox.clear()
        now += 1.0
    assert fleet.held == 0 and not any(replica.in_flight for replica in fleet.replicas)


script = st.lists(
    st.tuples(
        st.sampled_from(["send", "first", "end", "fail", "add", "remove", "forget", "probe"]),
        st.integers(0, 30),
    ),
    max_size=80,
)


@given(script=script, kind=st.sampled_from(["predicted_finish", "round_robin"]))
@settings(deadline=None, max_examples=80)
def test_B089_in_any_order_nothing_is_lost_and_nothing_stays(
    script: list[tuple[str, int]], kind: str
) -> None:
    fleet, flights, now, names = make_fleet(2, kind), [], 0.0, 2
    for action, which in script:
        now += 0.1
        live = [flight for flight in flights if not flight.over]
        members = [replica for replica in fleet.replicas if not replica.leaving]
        if action == "send":
            try:
                flights.append(send(fleet, prompt(which % 5, 1 + which, exact=which % 2 == 0), now))
            except NoReplica:
                assert not members
            else:
                assert flights[-1].replica in members
        elif action == "add" and len(fleet.replicas) < 6:
            names += 1
            fleet.replica_added(spec(names))
        elif action == "remove" and members:
            fleet.replica_removed(members[which % len(members)].index, now)
        elif action == "forget":
            assert all(replica.in_flight == 0 for replica in fleet.forget_departed())
        elif action == "probe" and members:
            fleet.probe_succeeded(members[which % len(members)].index, now)
        elif live:
            flight = live[which % len(live)]
            if action == "first":
                fleet.first_token(flight, now)
            elif action == "end":
                fleet.finished(flight, now, Usage(100, 10, which))
            elif action == "fail":
                fleet.failed(flight, now, Failure.CLOSED)
        fleet.index.check_invariants()
        fleet.caches.exact.check_invariants()
        assert sum(r.in_flight for r in fleet.replicas) == sum(not flight.over for flight in flights)
    for flight in flights:
        fleet.cancelled(flight, now)
    fleet.forget_departed()
    assert not any(replica.leaving for replica in fleet.replicas)
    for replica in list(fleet.replicas):
        fleet.replica_removed(replica.index, now)
    fleet.forget_departed()
    assert len(fleet.replicas) == 0 and fleet.index.nodes() == 0 and fleet.caches.exact.told.expected() == 0
    assert fleet.replicas.slots <= 6 + 2


def test_what_is_written_down_is_of_those_that_stay() -> None:
    fleet = make_fleet(2)
    send(fleet, prompt(1))
    old = send(fleet, prompt(2))
    fleet.replica_removed(old.replica.index, 0.0)
    fleet.replica_added(spec(old.replica.index))  # another server under the old one's name
    pieces = [piece for chunk in written_down(fleet) for piece in chunk]
    stored = [piece.replica for piece in pieces if isinstance(piece, PromptStored)]
    assert stored == ["r0"] and old.replica.name == "r1"
    other = make_fleet(2)
    taken_in(other, "somebody", pieces, 0.0)
    assert other.index.held(0) and not other.index.held(1)
