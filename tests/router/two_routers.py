"""Fleets of routers that tell each other what they do, without Redis between them."""

import random

from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight
from router.routing.journal import Journal
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec

BLOCK = 16


def make_fleet(router: str, *, replicas: int = 2, hold: bool = False) -> tuple[Fleet, Journal]:
    fleet = Fleet(
        [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(replicas)],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(hold=hold),
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    journal = fleet.journal = Journal(router, fleet.caches.exact)
    return fleet, journal


def prompt(name: int, blocks: int, *, stream: bool = True) -> Prompt:
    keys = [name * 1_000_000 + block for block in range(blocks)]
    return Prompt(keys=keys, units=blocks * BLOCK + 3, layout=UniformLayout(BLOCK), stream=stream)


def sent(fleet: Fleet, name: int, blocks: int, now: float = 0.0) -> InFlight:
    made = fleet.submit(prompt(name, blocks), now)
    assert isinstance(made, InFlight)
    return made


def restate(fleet: Fleet, router: str, journal: Journal, origin: Fleet, now: float) -> None:
    """``fleet`` hears a statement of ``origin``, in two pieces."""
    outstanding, events = journal.statement(origin.replicas, now)
    fleet.peers.stated(router, outstanding, now)
    fleet.peers.told(router, events[:3], now)
    fleet.peers.told(router, events[3:], now)


def figures(fleet: Fleet) -> list[tuple[int, int, int]]:
    return [(r.ledger.queued, r.ledger.decoding, r.ledger.outstanding_tokens) for r in fleet.replicas]


def nothing(fleet: Fleet) -> bool:
    return not any(map(any, figures(fleet))) and not any(len(r.held) for r in fleet.replicas)
