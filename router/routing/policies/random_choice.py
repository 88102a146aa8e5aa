"""Any candidate, with the same chance."""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class RandomChoice:
    """Promise: every candidate has the same chance, whatever came before."""

    samples = False

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """One candidate at random."""
        return decide_by_load(request, self._rng.choice(candidates))

    def copy(self) -> "RandomChoice":
        """An independent one in the same state."""
        return RandomChoice(same_state(self._rng))

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill, for information: they decide nothing here."""
        return assess_own_delay(request, candidates)
