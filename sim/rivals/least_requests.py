"""Least requests in flight, ties at random: HAProxy's and nginx's least connections.

Envoy's least request draws two and takes the lesser; seeing all of them is the best such a rule can do.
"""

from collections.abc import Sequence

from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import ScoreRule


class LeastRequests(ScoreRule):
    """Promise: nobody had fewer requests than the one chosen."""

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """Requests in flight."""
        return [float(candidate.ledger.in_flight) for candidate in candidates]
