"""LMetric (Zhang et al., OSDI '26, arXiv 2603.15202): uncached tokens times requests.

Score P x B, the least wins. P: prompt tokens queued uncached on the replica, and those of this request it
would have to compute. B: requests there, this one included. Any weights would cancel in a product. (Ports
that leave out the queued tokens hold hits and lose latency: this is the faithful form.)

Worked example, 4,000-token prompt: A holds 3,000 of it, has 5,000 tokens queued and 9 requests; B is cold,
empty, 2 requests::

    A: (5,000 + 1,000) * 10 = 60,000        B: (0 + 4,000) * 3 = 12,000      B
"""

import random
from collections.abc import Sequence

from router.routing.in_flight import InFlight
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.pending_prefill import PendingPrefill
from sim.rivals.rule import ScoreRule


class LMetric(ScoreRule):
    """Promise: no candidate had a smaller product of uncached tokens and requests."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._pending = PendingPrefill()

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """Tokens times requests."""
        pending, matched = self._pending.tokens, request.matched_tokens
        return [
            float((pending(c.index) + request.prompt_tokens - matched[c.index]) * (c.ledger.in_flight + 1))
            for c in candidates
        ]

    def sent(self, flight: InFlight, now: float) -> None:
        """Its uncached tokens are queued."""
        self._pending.sent(flight)

    def first_token(self, flight: InFlight, now: float) -> None:
        """They are computed."""
        self._pending.done(flight)

    def over(self, flight: InFlight, now: float) -> None:
        """They are gone, whatever became of them."""
        self._pending.done(flight)
