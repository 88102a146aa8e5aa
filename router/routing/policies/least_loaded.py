"""The candidate with the least load, by any load measure; ties at random."""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision
from router.routing.policies.load_measure import LOAD_MEASURES
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class LeastLoaded:
    """Promise: no candidate had less load than the one chosen."""

    samples = False

    def __init__(self, rng: random.Random, measure: str = "outstanding_tokens") -> None:
        self._rng = rng
        self._measure = measure
        self._load = LOAD_MEASURES[measure]

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The least loaded candidate."""
        least, best = float("inf"), []
        for candidate in candidates:
            load = self._load(candidate, request.now)
            if load < least:
                least, best = load, [candidate]
            elif load == least:
                best.append(candidate)
        return decide_by_load(request, best[0] if len(best) == 1 else self._rng.choice(best))

    def copy(self) -> "LeastLoaded":
        """An independent one in the same state."""
        return LeastLoaded(same_state(self._rng), self._measure)

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill for information; ``total_s`` is the load measure, whatever its unit."""
        return [
            row._replace(total_s=self._load(candidate, request.now))
            for row, candidate in zip(assess_own_delay(request, candidates), candidates, strict=True)
        ]
