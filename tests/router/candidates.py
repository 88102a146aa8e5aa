"""Candidates for policy tests: replicas in any state, put there directly."""

import random
from collections.abc import Sequence

from hypothesis import strategies as st

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.calibration import ReplicaCost
from router.routing.fleet_speed import FleetSpeed
from router.routing.health import Health, HealthSettings
from router.routing.ledger import Ledger
from router.routing.policies import POLICIES
from router.routing.replica_state import ReplicaSpec, ReplicaState
from router.routing.view import Policy, RoutingRequest


def standing(
    *,
    queued: int = 0,
    decoding: int = 0,
    outstanding_tokens: int = 0,
    backlog: float = 0.0,
    load: float = 0.0,
) -> Ledger:
    """A ledger at time 0; where there is a backlog something is queued."""
    return Ledger.as_read(queued or int(backlog > 0.0), decoding, outstanding_tokens, backlog, load, 0.0)


def given_cost(per_token_s: float = 1e-4, step_s: float = 0.01) -> ReplicaCost:
    """The quadratic term doubles the first token's price 64,000 tokens in; 100 streams double a step."""
    return ReplicaCost(
        FleetSpeed(), PrefillCost(0.0, per_token_s, 64_000.0), DecodeCost(step_s, step_s / 100.0)
    )


def candidate(
    index: int, ledger: Ledger | None = None, cost: ReplicaCost | None = None, *, weight: float = 1.0
) -> ReplicaState:
    """A healthy replica that stands so."""
    spec = ReplicaSpec(f"replica-{index}", f"http://127.0.0.1:{9_000 + index}", weight=weight)
    made = ReplicaState(index, spec, Health(HealthSettings()), cost or given_cost())
    made.ledger = ledger or standing()
    return made


def request(
    tokens: int,
    matched: Sequence[int],
    *,
    arrivals: float = 0.0,
    utilization: float = 0.0,
    price: float = 0.0,
    copy_price: float = 1.0,
    universal: int = 0,
) -> RoutingRequest:
    return RoutingRequest(
        now=0.0,
        prompt_tokens=tokens,
        matched_tokens=matched,
        arrivals_per_replica_s=arrivals,
        fleet_utilization=utilization,
        decode_price=price,
        expected_output_tokens=100.0,
        copy_price=copy_price,
        universal_tokens=universal,
    )


def policy(kind: str, seed: int = 1) -> Policy:
    return POLICIES[kind](random.Random(seed))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[RoutingRequest, list[ReplicaState]]:
    """A request and 1 to 6 candidates in any state."""
    count = draw(st.integers(1, 6))
    tokens = draw(st.integers(1, 50_000))
    matched = [draw(st.one_of(st.just(0), st.integers(0, tokens - 1))) for _ in range(count)]
    candidates = [
        candidate(
            index,
            standing(
                queued=draw(st.integers(0, 20)),
                decoding=draw(st.integers(0, 100)),
                outstanding_tokens=draw(st.integers(0, 10**6)),
                backlog=draw(st.floats(0, 20)),
                load=draw(st.floats(0, 0.95)),
            ),
            given_cost(draw(st.floats(1e-6, 1e-3))),
        )
        for index in range(count)
    ]
    asked = request(
        tokens,
        matched,
        arrivals=draw(st.floats(0, 20)),
        utilization=draw(st.floats(0, 0.95)),
        price=draw(st.floats(0, 1)),
        copy_price=draw(st.one_of(st.just(1.0), st.floats(0, 1))),
    )
    return asked, candidates
