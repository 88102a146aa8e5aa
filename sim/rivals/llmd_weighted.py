"""llm-d's default before August 2026: queue 2, KV use 2, prefix 3; the largest weighted sum wins.

Scores in [0, 1], from metrics read every 50 ms::

    queue  = (longest - own) / (longest - shortest)    waiting requests; 1 for everybody when all are alike
    memory = 1 - share of KV blocks in use
    prefix = matched share of the prompt

Ties at random (its max-score picker shuffles). Source: ``pkg/epp/config/loader/defaults.go`` and the scorers
of llm-d-inference-scheduler as read in September 2026.
"""

import random
from collections.abc import Sequence

from replica.contract.load_report import LoadReport
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import ScoreRule

QUEUE, MEMORY, PREFIX = 2.0, 2.0, 3.0


class LlmdWeighted(ScoreRule):
    """Promise: no candidate had a larger weighted sum, as of the last metrics."""

    metrics_every_s = 0.05

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._waiting: dict[int, int] = {}
        self._kv_usage: dict[int, float] = {}

    def measured(
        self, replicas: Sequence[ReplicaState], reports: Sequence[LoadReport | None], now: float
    ) -> None:
        """The gauges of every replica that answers."""
        for index, report in enumerate(reports):
            if report is not None:
                self._waiting[index] = report.waiting or 0
                self._kv_usage[index] = report.kv_usage or 0.0

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """The weighted sum with its sign turned: the least is the best."""
        waiting = [self._waiting.get(candidate.index, 0) for candidate in candidates]
        longest, shortest = max(waiting), min(waiting)
        scores = []
        for candidate, own in zip(candidates, waiting, strict=True):
            queue = 1.0 if longest == shortest else (longest - own) / (longest - shortest)
            memory = 1.0 - self._kv_usage.get(candidate.index, 0.0)
            prefix = request.matched_tokens[candidate.index] / request.prompt_tokens
            scores.append(-(QUEUE * queue + MEMORY * memory + PREFIX * prefix))
        return scores
