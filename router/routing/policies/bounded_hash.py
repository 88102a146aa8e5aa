"""Consistent hashing with bounded load, on a key deep inside the prompt."""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.policies.rendezvous import DEFAULT_BOUND, home
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class BoundedHash:
    """Promise: one deep key, one replica, while that carries at most 1.25 x the mean of requests.

    The key is the block about 1,024 tokens into the prompt: the first block is the same for everybody who
    shares a system prompt, the last one is nobody else's. A prompt without a whole block goes to the least
    loaded candidate.
    """

    samples = False

    def __init__(self, rng: random.Random, bound: float = DEFAULT_BOUND) -> None:
        self._bound = bound
        self._without = LeastLoaded(rng)

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The key's home, or the next in its order when home is over its bound."""
        if request.route_key is None:
            return self._without.choose(request, candidates)
        chosen, first = home(request.route_key.to_bytes(8, "little"), candidates, self._bound)
        decision = decide_by_load(request, chosen)
        if not first:
            return decision.because(Reason.SPILL)
        return decision.because(Reason.WARM if decision.matched_tokens else Reason.COLD)

    def copy(self) -> "BoundedHash":
        """An independent one in the same state."""
        twin = BoundedHash(random.Random(), self._bound)
        twin._without = self._without.copy()
        return twin

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill, for information: the hash decides."""
        return assess_own_delay(request, candidates)
