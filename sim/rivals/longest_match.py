"""Prefix affinity and nothing else: the longest match, among equals the fewest requests."""

from collections.abc import Sequence

from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import ScoreRule

MANY_REQUESTS = 1e6
"""So many requests one matched token outweighs."""


class LongestMatch(ScoreRule):
    """Promise: no candidate matched more than the one chosen."""

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """Requests in flight, less an overwhelming reward per matched token."""
        matched = request.matched_tokens
        return [c.ledger.in_flight - MANY_REQUESTS * matched[c.index] for c in candidates]
