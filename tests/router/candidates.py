"""Candidates for policy tests: plain values with the attributes a policy reads."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import strategies as st

from router.routing.hold_queue import HoldQueue
from router.routing.policies import POLICIES
from router.routing.view import Policy, RoutingRequest


@dataclass
class FakeLedger:
    queued: int = 0
    decoding: int = 0
    outstanding_tokens: int = 0
    backlog: float = 0.0
    load: float = 0.0

    @property
    def in_flight(self) -> int:
        return self.queued + self.decoding

    def backlog_s(self, now: float) -> float:
        return self.backlog

    def utilization(self, now: float) -> float:
        return self.load


@dataclass
class FakeCost:
    per_token_s: float = 1e-4
    step: float = 0.01

    def prefill_s(self, new_tokens: int, position: int) -> float:
        return self.per_token_s * new_tokens * (1 + (position + new_tokens / 2) / 64_000)

    def step_s(self, sequences: int) -> float:
        return self.step * (1 + sequences / 100)


@dataclass
class FakeCandidate:
    index: int
    ledger: FakeLedger = field(default_factory=FakeLedger)
    cost: FakeCost = field(default_factory=FakeCost)
    room_price_s: float = 0.0
    weight: float = 1.0
    held: HoldQueue = field(default_factory=HoldQueue)

    @property
    def name(self) -> str:
        return f"replica-{self.index}"


def request(
    tokens: int,
    matched: Sequence[int],
    *,
    arrivals: float = 0.0,
    utilization: float = 0.0,
    price: float = 0.0,
    copy_price: float = 1.0,
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
    )


def policy(kind: str, seed: int = 1) -> Policy:
    return POLICIES[kind](random.Random(seed))


@st.composite
def fleets(draw: st.DrawFn) -> tuple[RoutingRequest, list[FakeCandidate]]:
    """A request and 1 to 6 candidates in any state."""
    count = draw(st.integers(1, 6))
    tokens = draw(st.integers(1, 50_000))
    matched = [draw(st.one_of(st.just(0), st.integers(0, tokens - 1))) for _ in range(count)]
    candidates = [
        FakeCandidate(
            index,
            FakeLedger(
                queued=draw(st.integers(0, 20)),
                decoding=draw(st.integers(0, 100)),
                outstanding_tokens=draw(st.integers(0, 10**6)),
                backlog=draw(st.floats(0, 20)),
                load=draw(st.floats(0, 0.95)),
            ),
            FakeCost(draw(st.floats(1e-6, 1e-3))),
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
