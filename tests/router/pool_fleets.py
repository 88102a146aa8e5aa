"""Fleets of replicas with roles: prompts of a length, requests in one step and in two."""

import random

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.decision import Decision
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight, Usage
from router.routing.kv_route import KvPull, KvRoute, Role, Step
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from tests.router.small_fleet import BLOCK

LONG = tuple(range(1_000))
"""16,003 tokens: 1.6 s of prefill, 116 ms to move."""
SHORT = tuple(range(10))
"""163 tokens: 16 ms of prefill, 27 ms to move."""
PREFILL = PrefillCost(0.0, 1e-4, 1e12)
DECODE = DecodeCost(0.01, 0.0)


def replica_spec(name: str, role: Role = Role.BOTH, pull: KvPull = KvPull.WARMROUTE) -> ReplicaSpec:
    return ReplicaSpec(
        name,
        f"http://{name}",
        prefill=PREFILL,
        decode=DECODE,
        role=role,
        kv_pull=pull,
        kv_source=f"{name}:8400" if pull is not KvPull.VLLM else None,
    )


def fleet_of(*specs: ReplicaSpec, kind: str = "predicted_finish", hold: bool = False) -> Fleet:
    fleet = Fleet(
        specs,
        POLICIES[kind](random.Random(1)),
        FleetSettings(hold=hold),
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    for index in range(len(specs)):
        fleet.probe_succeeded(index, 0.0)
    return fleet


def two_pools(*, both: int = 0, pull: KvPull = KvPull.WARMROUTE, kind: str = "predicted_finish") -> Fleet:
    """0: prefill, 1 and 2: decode, then some that do both."""
    return fleet_of(
        replica_spec("p", Role.PREFILL, pull),
        replica_spec("d1", Role.DECODE, pull),
        replica_spec("d2", Role.DECODE, pull),
        *(replica_spec(f"b{number}", Role.BOTH, pull) for number in range(both)),
        kind=kind,
    )


def route_of(decision: Decision) -> KvRoute:
    assert decision.route is not None
    return decision.route


def submitted(fleet: Fleet, asked: Prompt, now: float = 0.0) -> InFlight:
    made = fleet.submit(asked, now, two_steps=True)
    assert isinstance(made, InFlight)
    return made


def two_steps(fleet: Fleet, asked: Prompt, now: float) -> InFlight:
    """Through the prefill pool; the flight of the second step."""
    first = submitted(fleet, asked, now)
    assert route_of(first.decision).step is Step.PREFILL
    fleet.finished(first, now + first.decision.prefill_s, Usage(asked.units, 1, 0))
    decision = fleet.decide_answerer(asked, now + first.decision.prefill_s, first.replica)
    return fleet.sent(asked, decision, now + first.decision.prefill_s)
