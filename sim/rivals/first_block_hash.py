"""Consistent hashing with bounded load on the prompt's first block: what many gateways call session affinity.

The router's own ``bounded_hash`` takes a block about 1,024 tokens in. Where a system prompt is shared the
first block is everybody's, and all traffic has one home: this rule shows what the deeper key is worth.
"""

import random
from collections.abc import Sequence

from router.routing.decision import Decision, Reason
from router.routing.policies.own_delay import decide_by_load
from router.routing.policies.rendezvous import DEFAULT_BOUND, home
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import Rule


class FirstBlockHash(Rule):
    """Promise: one first block, one replica, while that carries at most 1.25 x the mean of requests."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._key: int | None = None

    def arriving(self, prompt: Prompt) -> None:
        """Its first block is the key."""
        self._key = prompt.keys[0] if prompt.keys else None

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The key's home, or the next in its order; without a key, any."""
        if self._key is None:
            return decide_by_load(request, self.rng.choice(candidates))
        chosen, first = home(self._key.to_bytes(8, "little"), candidates, DEFAULT_BOUND)
        decision = decide_by_load(request, chosen)
        return decision if first else decision.because(Reason.SPILL)
