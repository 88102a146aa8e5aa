"""Every candidate in turn."""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class RoundRobin:
    """Promise: over any stretch in which the candidates stay the same, counts differ by at most one."""

    samples = False

    def __init__(self, rng: random.Random) -> None:
        self._last = -1

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The first candidate after the last one chosen, in fleet order."""
        chosen = next((c for c in candidates if c.index > self._last), candidates[0])
        self._last = chosen.index
        return decide_by_load(request, chosen)

    def copy(self) -> "RoundRobin":
        """An independent one in the same state."""
        twin = RoundRobin(random.Random())
        twin._last = self._last
        return twin

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill, for information: they decide nothing here."""
        return assess_own_delay(request, candidates)
