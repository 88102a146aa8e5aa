"""What other routers' rules have in common here: scores, of which the least wins, and decisions with numbers.

A rule sees what the router's own policies see (``ReplicaState``: ledger, cost, matched tokens) and, as a
``Watcher``, every event. The numbers in its decision are this router's predictions, so that runs can be
compared; the choice is the rule's own.
"""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.watcher import Watcher


class Rule(Watcher):
    """A rule of another router. ``choose`` is its own; ``assess`` shows wait and prefill."""

    samples = False
    scored = False
    """``assess`` has the rule's own score in ``total_s``."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The rule's choice."""
        raise NotImplementedError

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill on every candidate, for information."""
        return assess_own_delay(request, candidates)


class ScoreRule(Rule):
    """The candidate of least score; ties at random."""

    scored = True

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """By candidate, in the rule's own unit."""
        raise NotImplementedError

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The candidate of least score."""
        return decision(request, candidates, least(self.scores(request, candidates), candidates, self.rng))

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill for information; ``total_s`` is the score, whatever its unit."""
        rows = assess_own_delay(request, candidates)
        scores = self.scores(request, candidates)
        return [row._replace(total_s=score) for row, score in zip(rows, scores, strict=True)]


def least(scores: Sequence[float], candidates: Sequence[ReplicaState], rng: random.Random) -> ReplicaState:
    """The candidate of least score; ties at random."""
    lowest = min(scores)
    best = [candidate for score, candidate in zip(scores, candidates, strict=True) if score == lowest]
    return best[0] if len(best) == 1 else rng.choice(best)


def decision(request: RoutingRequest, candidates: Sequence[ReplicaState], chosen: ReplicaState) -> Decision:
    """``chosen``, with predicted numbers, and whether a warmer candidate was passed over."""
    made = decide_by_load(request, chosen)
    longest = max(request.matched_tokens[candidate.index] for candidate in candidates)
    if not longest:
        return made.because(Reason.COLD)
    return made.because(Reason.WARM if made.matched_tokens == longest else Reason.SPILL)
