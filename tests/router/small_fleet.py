"""A fleet of a few replicas alike, prompts by their blocks, and whether anything is left of requests."""

import random

from router.routing.calibration import ReplicaCost
from router.routing.decision import Decision
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthSettings
from router.routing.in_flight import InFlight
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec

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


def prefilled(cost: ReplicaCost, start: float, end: float, new_tokens: int, position: int = 0) -> None:
    """The replica computed one prompt, and nothing else, from ``start`` to ``end``."""
    cost.prefill_started(start)
    busy_s = cost.prefill_finished(end, still_queued=0)
    assert busy_s is not None
    cost.prefilled(busy_s, new_tokens, position)


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
