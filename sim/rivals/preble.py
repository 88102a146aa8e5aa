"""Preble's E2 (ICLR '25, arXiv 2407.00023): exploit a prefix that is worth it, else explore by load.

*Exploit* when more of the prompt is cached than is not: among the replicas with the longest match, the least
loaded. Else *explore*: the least of load + eviction + own prefill, all in seconds. A replica's load is what
was sent there in the last three minutes: prefill, and decoding of the median answer. If the replica to
exploit is more than 1.5 times as loaded as the least loaded one, the request moves there, and its prefix with
it.

Approximations: eviction is priced as the fleet's hit share of as many tokens as are computed (its own weighs
each evicted node by its hits); a hot node is not split between two replicas beforehand but by that 1.5 rule.
"""

import random
from collections import deque
from collections.abc import Sequence
from statistics import median

from router.routing.decision import Assessment, Decision
from router.routing.in_flight import InFlight
from router.routing.policies.own_delay import assess_own_delay
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import Rule, decision, least

WINDOW_S = 180.0
IMBALANCE = 1.5
ANSWERS = 200


class PrebleE2(Rule):
    """Promise: a prefix that is mostly cached is exploited, up to 1.5 times the least load."""

    scored = True

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._sent: dict[int, deque[tuple[float, float]]] = {}
        self._load_s: dict[int, float] = {}
        self._answers: deque[int] = deque([256], maxlen=ANSWERS)
        self._median_answer = 256.0
        self._hit_tokens = self._tokens = 1.0

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """Exploit or explore."""
        rows = assess_own_delay(request, candidates)
        longest = max(row.matched_tokens for row in rows)
        loads = [self._load(candidate.index, request.now) for candidate in candidates]
        if longest > request.prompt_tokens - longest:
            holders = [i for i, row in enumerate(rows) if row.matched_tokens == longest]
            lightest = least([loads[i] for i in holders], [candidates[i] for i in holders], self.rng)
            load = loads[[c.index for c in candidates].index(lightest.index)]
            if load > IMBALANCE * min(loads):
                lightest = least(loads, candidates, self.rng)
            return decision(request, candidates, lightest)
        return decision(request, candidates, least(self._costs(rows, loads), candidates, self.rng))

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """The explore cost of every candidate."""
        rows = assess_own_delay(request, candidates)
        loads = [self._load(candidate.index, request.now) for candidate in candidates]
        costs = self._costs(rows, loads)
        return [
            row._replace(wait_s=load, total_s=cost)
            for row, load, cost in zip(rows, loads, costs, strict=True)
        ]

    def _costs(self, rows: Sequence[Assessment], loads: Sequence[float]) -> list[float]:
        evicted = self._hit_tokens / self._tokens
        return [load + (1.0 + evicted) * row.prefill_s for row, load in zip(rows, loads, strict=True)]

    def _load(self, replica: int, now: float) -> float:
        sent = self._sent.get(replica)
        if not sent:
            return 0.0
        while sent and sent[0][0] < now - WINDOW_S:
            self._load_s[replica] -= sent.popleft()[1]
        return max(0.0, self._load_s[replica])

    def sent(self, flight: InFlight, now: float) -> None:
        """Its prefill and the decoding of a median answer count for three minutes."""
        replica = flight.replica
        step_s = replica.cost.step_s(replica.ledger.decoding + 1) / max(1, replica.ledger.decoding + 1)
        seconds = flight.decision.prefill_s + self._median_answer * step_s
        self._sent.setdefault(replica.index, deque()).append((now, seconds))
        self._load_s[replica.index] = self._load_s.get(replica.index, 0.0) + seconds
        self._hit_tokens += flight.decision.matched_tokens
        self._tokens += flight.decision.matched_tokens + flight.booking.new_tokens

    def over(self, flight: InFlight, now: float) -> None:
        """Learn how long answers are."""
        if flight.first_token_at is not None:
            step_s = flight.replica.cost.step_s(max(1, flight.replica.ledger.decoding))
            self._answers.append(max(1, int((now - flight.first_token_at) / step_s)))
            self._median_answer = float(median(self._answers))
