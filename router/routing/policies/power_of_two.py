"""Two candidates at random, the less loaded of them (Mitzenmacher, 2001)."""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision
from router.routing.policies.load_measure import LOAD_MEASURES
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class PowerOfTwo:
    """Promise: of three or more candidates, the most loaded alone is never chosen."""

    samples = False

    def __init__(self, rng: random.Random, measure: str = "outstanding_tokens") -> None:
        self._rng = rng
        self._measure = measure
        self._load = LOAD_MEASURES[measure]

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The less loaded of two drawn without replacement."""
        count = len(candidates)
        if count == 1:
            return decide_by_load(request, candidates[0])
        first = self._rng.randrange(count)
        second = (first + 1 + self._rng.randrange(count - 1)) % count
        one, other = candidates[first], candidates[second]
        less = one if self._load(one, request.now) <= self._load(other, request.now) else other
        return decide_by_load(request, less)

    def copy(self) -> "PowerOfTwo":
        """An independent one in the same state."""
        return PowerOfTwo(same_state(self._rng), self._measure)

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill for information; which two are drawn is chance."""
        return assess_own_delay(request, candidates)
