"""Large fleets: what is drawn, that it is enough, and that policies which must see all do."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight, Usage
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.routing.shortlist import PRICE_ALL_UP_TO, Shortlist


def make_fleet(replicas: int, kind: str = "predicted_finish") -> Fleet:
    rng = random.Random(1)
    fleet = Fleet(
        [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(replicas)],
        POLICIES[kind](rng),
        FleetSettings(),
        rng=rng,
        layout=UniformLayout(16),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


def prompt(name: int, blocks: int = 100) -> Prompt:
    keys = [name * 10_000 + block for block in range(blocks)]
    return Prompt(keys=keys, units=blocks * 16 + 3, layout=UniformLayout(16), stream=True)


def send(fleet: Fleet, asked: Prompt, now: float) -> InFlight:
    return fleet.sent(asked, fleet.decide(asked, now), now)


@given(
    levels=st.lists(st.integers(0, (1 << 256) - 1), max_size=4),
    usable=st.integers(0, (1 << 256) - 1),
    busy=st.lists(st.integers(0, 255), max_size=300),
    seed=st.integers(0, 9),
)
def test_drawn_are_candidates_none_twice_and_few(
    levels: list[int], usable: int, busy: list[int], seed: int
) -> None:
    fleet = make_fleet(256)
    shortlist = Shortlist(fleet.replicas, random.Random(seed))
    for replica in busy:
        shortlist.became_busy(replica)
        if replica % 3 == 0:
            shortlist.became_idle(replica)
            shortlist.became_idle(replica)
    candidates = [replica for replica in fleet.replicas if usable >> replica.index & 1]
    taken, disjoint = 0, []
    for mask in levels:
        disjoint.append((mask & ~taken, 10 * (len(disjoint) + 1)))
        taken |= mask
    drawn = shortlist.draw(candidates, usable, disjoint)
    indexes = [replica.index for replica in drawn]
    assert len(set(indexes)) == len(indexes)
    assert all(usable >> index & 1 for index in indexes)
    if len(candidates) > PRICE_ALL_UP_TO:
        assert 1 <= len(drawn) <= PRICE_ALL_UP_TO
    else:
        assert drawn == candidates


def test_the_warm_replica_is_found_among_256() -> None:
    fleet = make_fleet(256)
    first = send(fleet, prompt(1), 0.0)
    fleet.first_token(first, 0.1)
    fleet.finished(first, 0.2, Usage(1_603, 10, 0))
    for _ in range(50):
        assert fleet.decide(prompt(1, 120), 1.0).replica == first.replica.index


def test_one_prefix_everywhere_still_spreads() -> None:
    """A system prompt that all 256 hold draws twelve of them, others each time."""
    fleet = make_fleet(256)
    for replica in fleet.replicas:
        fleet.index.insert(replica.index, prompt(1).keys)
    chosen = Counter(fleet.decide(prompt(1, 101), 0.0).replica for _ in range(2_000))
    assert len(chosen) > 200 and max(chosen.values()) < 60


def test_load_in_a_large_fleet_is_nearly_even() -> None:
    fleet, now = make_fleet(256), 0.0
    flights = [send(fleet, prompt(name), now) for name in range(512)]
    counts = Counter(flight.replica.index for flight in flights)
    assert max(counts.values()) <= 4 and len(counts) >= 250


@pytest.mark.parametrize("kind", ["round_robin", "session", "bounded_hash", "least_loaded"])
def test_policies_that_must_see_all_do(kind: str) -> None:
    fleet = make_fleet(64, kind)
    if kind == "round_robin":
        assert {fleet.decide(prompt(1), 0.0).replica for _ in range(64)} == set(range(64))
    else:
        homes = {fleet.decide(prompt(1), 0.0, session="one").replica for _ in range(30)}
        if kind == "least_loaded":
            for _ in range(64):
                send(fleet, prompt(1), 0.0)
            assert all(replica.ledger.queued == 1 for replica in fleet.replicas)
        else:
            assert len(homes) == 1
