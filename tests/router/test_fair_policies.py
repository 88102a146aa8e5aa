"""Tenants take turns whatever the policy, and policies see the requests that wait."""

import random
from collections.abc import Sequence

import pytest

from router.routing.decision import Assessment, Decision
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.policies import POLICIES
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.load_measure import LOAD_MEASURES
from router.routing.policies.own_delay import decide_by_load
from router.routing.prompt_blocks import UniformLayout
from router.routing.replica_state import ReplicaSpec, ReplicaState
from router.routing.tenant import Tenant
from router.routing.view import Policy, RoutingRequest
from tests.router.turns import prompt, sent_in_turn

FLOOD, OTHER = Tenant("flood"), Tenant("other")


def make_fleet(policy: Policy, replicas: int = 1, selectable: dict[str, Policy] | None = None) -> Fleet:
    fleet = Fleet(
        [ReplicaSpec(f"r{number}", f"http://r{number}") for number in range(replicas)],
        policy,
        FleetSettings(hold=True, hold_asked=True),
        selectable=selectable,
        layout=UniformLayout(16),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("kind", POLICIES)
def test_a_flood_does_not_keep_another_tenant_waiting(kind: str, asked: bool) -> None:
    rule = POLICIES[kind](random.Random(1))
    usual: Policy = LeastLoaded(random.Random(1)) if asked else rule
    fleet = make_fleet(usual, selectable={kind: rule} if asked else None)
    policy = kind if asked else None
    running = fleet.submit(prompt(FLOOD, 0, 500), 0.0, session="s", policy=policy)
    assert isinstance(running, InFlight)
    for name in range(1, 101):
        held = fleet.submit(prompt(FLOOD, name, 20), 0.0, session="s", policy=policy, context="flood")
        assert isinstance(held, Held)
    fleet.submit(prompt(OTHER, 999, 100), 0.0, session="s", policy=policy, context="other")
    order = sent_in_turn(fleet, running)
    assert len(order) == 101 and order.index("other") <= 12, "1,600 tokens are four turns of 512"


@pytest.mark.parametrize("measure", LOAD_MEASURES)
@pytest.mark.parametrize("kind", ["least_loaded", "power_of_two"])
def test_load_is_evened_out_among_those_who_wait_too(kind: str, measure: str) -> None:
    """What is in flight does not change while nobody is sent: by that alone one replica would get all."""
    policy = POLICIES[kind](random.Random(1), measure=measure)  # type: ignore[call-arg]
    fleet = make_fleet(policy, replicas=2)
    for name, blocks in ((1, 500), (2, 520)):
        assert isinstance(fleet.submit(prompt(FLOOD, name, blocks), 0.0), InFlight)
    for name in range(3, 43):
        assert isinstance(fleet.submit(prompt(FLOOD, name, 40), 0.0), Held)
    waiting = [len(replica.held) for replica in fleet.replicas]
    assert sum(waiting) == 40 and abs(waiting[0] - waiting[1]) <= 1


def test_a_hash_passes_on_what_its_home_has_no_room_for() -> None:
    fleet = make_fleet(POLICIES["bounded_hash"](random.Random(1)), replicas=2)
    head = prompt(FLOOD, 1, 80).keys
    for name in range(40):
        one = prompt(FLOOD, 10 + name, 100)
        one.keys = [*head, *one.keys]
        fleet.submit(one, 0.0)
    assigned = [replica.assigned for replica in fleet.replicas]
    assert sum(assigned) == 40 and max(assigned) <= 26, "1.25 times the mean, rounded up"


def test_affinity_ends_where_too_many_wait() -> None:
    """Both replicas are as busy; the warm one has a queue in the router that outweighs the hit."""
    fleet = make_fleet(POLICIES["prefix_affinity"](random.Random(1)), replicas=2)
    for name in (1, 2):
        assert isinstance(fleet.submit(prompt(FLOOD, name, 1_000), 0.0), InFlight)
    chosen = []
    for name in range(200):
        one = prompt(FLOOD, 10 + name, 40)
        one.keys = [*prompt(FLOOD, 1, 20).keys, *one.keys]  # begins as what runs on one of them
        held = fleet.submit(one, 0.0)
        assert isinstance(held, Held)
        chosen.append(held.decision.replica)
    assert set(chosen) == {0, 1}


class _Last:
    """The last candidate."""

    samples = False

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        return decide_by_load(request, candidates[-1])

    def copy(self) -> "_Last":
        return self

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        return []


def test_who_is_decided_again_is_by_the_policy_it_asked_for() -> None:
    first = POLICIES["least_loaded"](random.Random(1))
    fleet = make_fleet(first, replicas=4, selectable={"last": _Last()})
    busy = fleet.submit(prompt(FLOOD, 1, 500), 0.0, policy="last")
    held = fleet.submit(prompt(FLOOD, 2, 500), 0.0, policy="last")
    assert isinstance(busy, InFlight) and isinstance(held, Held)
    assert busy.replica.index == held.decision.replica == 3
    fleet.drained(3, 0.1)
    assert held.flight is not None and held.flight.replica.index == 2
