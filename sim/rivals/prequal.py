"""Like Prequal (NSDI '24, arXiv 2312.10172): probes made ahead, hot-cold rule over requests and latency.

Three replicas are probed with each request; answers (requests in flight, expected latency) go into a pool of
16, each used a few times and not longer than a second. A probed replica is *hot* if its requests in flight
exceed the 0.84 quantile of recent answers. Cold ones: least latency. All hot: least requests in flight. After
each choice the worst or the oldest of the pool is dropped, in turns.

Expected latency is the replica's queued prefill here. The paper's median of recent latencies says nothing
where prompts of 100 and of 100,000 tokens share a queue: with it this rule was worse than random. It knows
nothing of prefixes. The paper's constants where it gives them.
"""

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from router.routing.decision import Decision
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import Rule, decision

PROBES_PER_REQUEST = 3
POOL = 16
MAX_AGE_S = 1.0
USES = 3
HOT_QUANTILE = 0.84
RECENT = 128
"""Answers of which the quantile is taken."""


@dataclass(slots=True)
class _Probe:
    replica: int
    in_flight: int
    latency_s: float
    at_s: float
    uses_left: int


class Prequal(Rule):
    """Promise: of the probed replicas that are not hot, the one chosen had the least latency."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._pool: list[_Probe] = []
        self._levels: deque[int] = deque(maxlen=RECENT)
        self._drop_oldest = False

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """Probe, then the hot-cold rule."""
        self._probe(candidates, request.now)
        by_index = {candidate.index: candidate for candidate in candidates}
        pool = [probe for probe in self._pool if probe.replica in by_index]
        levels = sorted(self._levels)
        hot = levels[min(len(levels) - 1, int(HOT_QUANTILE * len(levels)))]
        cold = [probe for probe in pool if probe.in_flight <= hot]
        if cold:
            best = min(cold, key=lambda probe: (probe.latency_s, probe.in_flight))
        else:
            best = min(pool, key=lambda probe: probe.in_flight)
        chosen = by_index[best.replica]
        best.in_flight += 1  # the probe's answer, with what was sent on the strength of it
        best.latency_s += chosen.cost.prefill_s(request.prompt_tokens, 0)
        best.uses_left -= 1
        self._drop(hot)
        return decision(request, candidates, chosen)

    def _probe(self, candidates: Sequence[ReplicaState], now: float) -> None:
        self._pool = [p for p in self._pool if p.uses_left > 0 and now - p.at_s <= MAX_AGE_S]
        for candidate in self.rng.sample(list(candidates), min(PROBES_PER_REQUEST, len(candidates))):
            in_flight, backlog_s = candidate.ledger.in_flight, candidate.ledger.backlog_s(now)
            self._pool = [p for p in self._pool if p.replica != candidate.index]
            self._pool.append(_Probe(candidate.index, in_flight, backlog_s, now, USES))
            self._levels.append(in_flight)
        del self._pool[:-POOL]

    def _drop(self, hot: int) -> None:
        """One entry leaves per request: the oldest, then the worst, in turns."""
        if len(self._pool) > PROBES_PER_REQUEST:
            if self._drop_oldest:
                self._pool.remove(min(self._pool, key=lambda p: p.at_s))
            else:
                self._pool.remove(max(self._pool, key=lambda p: (p.in_flight > hot, p.latency_s)))
            self._drop_oldest = not self._drop_oldest
