"""Candidates as a lesson shows them: costs known and equal; without reservations, ledgers as last read.

Replicas whose speed is learned never tie exactly. Here it is given, so that a tie is a tie and only queues
and hits tell candidates apart.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.calibration import ReplicaCost
from router.routing.fleet_speed import FleetSpeed
from router.routing.ledger import Ledger
from router.routing.replica_state import ReplicaState

COST = ReplicaCost(FleetSpeed(), PrefillCost(0.008, 62.5e-6, 64_000.0), DecodeCost(0.008, 60e-6))
"""The emulated replica's; nothing is ever learned here."""


def shown(candidate: ReplicaState, ledger: Ledger) -> ReplicaState:
    """``candidate`` as if it had ``ledger``, and cost what is given."""
    twin = ReplicaState(candidate.index, candidate.spec, candidate.health, COST)
    twin.ledger = ledger
    twin.held = candidate.held
    twin.room_price_s = candidate.room_price_s
    return twin


@dataclass(frozen=True, slots=True)
class Reading:
    """A ledger's figures at one time."""

    queued: int = 0
    decoding: int = 0
    outstanding_tokens: int = 0
    free_at: float = float("-inf")
    load: float = 0.0


class FrozenLedgers:
    """Remembers ledgers between two readings of the metrics."""

    __slots__ = ("_seen", "read_at_s")

    def __init__(self) -> None:
        self._seen: dict[int, Reading] = {}
        self.read_at_s = 0.0
        """When they were last read."""

    def read(self, replicas: Sequence[ReplicaState], now: float) -> None:
        """Metrics are read: these figures stand until the next time."""
        self.read_at_s = now
        for replica in replicas:
            ledger = replica.ledger
            self._seen[replica.index] = Reading(
                ledger.queued,
                ledger.decoding,
                ledger.outstanding_tokens,
                now + ledger.backlog_s(now),
                ledger.utilization(now),
            )

    def ledger(self, replica: int, now: float) -> Ledger:
        """A replica's ledger as the last metrics show it: what was queued then is worked off, what was sent
        since is not there.
        """
        seen = self._seen.get(replica, Reading())
        left_s = max(0.0, seen.free_at - now)
        queued = seen.queued if left_s else 0
        decoding = seen.decoding + seen.queued - queued
        return Ledger.as_read(queued, decoding, seen.outstanding_tokens, left_s, seen.load, now)
