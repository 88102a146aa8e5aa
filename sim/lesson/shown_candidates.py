"""Candidates as a lesson shows them: costs known and equal; without reservations, ledgers as last read.

Replicas whose speed is learned never tie exactly. Here it is given, so that a tie is a tie and only queues
and hits tell candidates apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.replica_state import ReplicaState
from router.routing.view import Candidate, CostView, HeldView, LedgerView


@dataclass(frozen=True, slots=True)
class FrozenLedger:
    """A ledger at one time. What was queued then is worked off; what was sent since is not there."""

    queued: int
    decoding: int
    outstanding_tokens: int
    free_at: float
    load: float

    @property
    def in_flight(self) -> int:
        """``queued + decoding``."""
        return self.queued + self.decoding

    def backlog_s(self, now: float) -> float:
        """What is left of what was queued."""
        return max(0.0, self.free_at - now)

    def utilization(self, now: float) -> float:
        """As it was."""
        return self.load


@dataclass(frozen=True, slots=True)
class GivenCost:
    """What work costs, exactly."""

    prefill: PrefillCost
    decode: DecodeCost

    def prefill_s(self, new_tokens: int, position: int) -> float:
        """Seconds to prefill ``new_tokens`` after ``position`` cached ones."""
        return self.prefill.seconds(new_tokens, position)

    def step_s(self, sequences: int) -> float:
        """Seconds of one decode step."""
        return self.decode.step_seconds(sequences)


# The emulated replica's.
COST = GivenCost(PrefillCost(0.008, 62.5e-6, 64_000.0), DecodeCost(0.008, 60e-6))


@dataclass(frozen=True, slots=True)
class ShownCandidate:
    """A candidate with a given cost, and its own ledger or an old one."""

    index: int
    name: str
    weight: float
    ledger: LedgerView
    cost: CostView
    held: HeldView
    room_price_s: float


def shown(candidate: Candidate, ledger: LedgerView) -> ShownCandidate:
    """``candidate`` as if it had ``ledger``."""
    return ShownCandidate(
        candidate.index,
        candidate.name,
        candidate.weight,
        ledger,
        COST,
        candidate.held,
        candidate.room_price_s,
    )


NEVER_READ = FrozenLedger(0, 0, 0, float("-inf"), 0.0)


class FrozenLedgers:
    """Remembers ledgers between two readings of the metrics."""

    __slots__ = ("_seen", "read_at_s")

    def __init__(self) -> None:
        self._seen: dict[int, FrozenLedger] = {}
        self.read_at_s = 0.0
        """When they were last read."""

    def read(self, replicas: Sequence[ReplicaState], now: float) -> None:
        """Metrics are read: these figures stand until the next time."""
        self.read_at_s = now
        for replica in replicas:
            ledger = replica.ledger
            self._seen[replica.index] = FrozenLedger(
                ledger.queued,
                ledger.decoding,
                ledger.outstanding_tokens,
                now + ledger.backlog_s(now),
                ledger.utilization(now),
            )

    def ledger(self, replica: int, now: float) -> FrozenLedger:
        """A replica's ledger as the last metrics show it, what was queued then worked off since."""
        ledger = self._seen.get(replica, NEVER_READ)
        if ledger.queued and ledger.free_at <= now:
            return replace(ledger, queued=0, decoding=ledger.in_flight)
        return ledger
