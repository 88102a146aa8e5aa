"""Prefix affinity and nothing else: the longest match, among equals the shortest queue."""

from collections.abc import Sequence

from router.routing.view import Candidate, RoutingRequest
from sim.rivals.rule import ScoreRule

MUCH_S = 1e6
"""Seconds that one matched token outweighs."""


class LongestMatch(ScoreRule):
    """Promise: no candidate matched more than the one chosen."""

    def scores(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[float]:
        """Seconds of queue, less an overwhelming reward per matched token."""
        matched, now = request.matched_tokens, request.now
        return [c.ledger.backlog_s(now) - MUCH_S * matched[c.index] for c in candidates]
