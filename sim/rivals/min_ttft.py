"""Least predicted time to first token: Mooncake's Conductor (FAST '25) without transfers; no prices.

Queue plus own prefill, with this router's ledger, calibration and index. The same numbers as
``predicted_finish`` with every price zero.
"""

from collections.abc import Sequence

from router.routing.policies.own_delay import assess_own_delay
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import ScoreRule


class MinTtft(ScoreRule):
    """Promise: nobody was predicted to show the first token sooner."""

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """Seconds to the first token."""
        return [row.total_s for row in assess_own_delay(request, candidates)]
