"""llm-d's default since August 2026: sticky until saturated, then the least tokens in flight.

Candidates that hold at least 80% of the prompt are *sticky*. A candidate's wait is estimated as its uncached
tokens in flight over a measured peak of prefill tokens per second. While the best sticky candidate would wait
at most 18 s longer than the best other one, only sticky ones are considered; among those considered the one
with the least tokens in flight, this request's uncached ones included, wins. The 18 s are the same for a hit
that saves 20 ms and for one that saves 2 s.

Source: ``prefix-cache-affinity-filter`` and ``token-load-scorer`` as read in September 2026, shipped values;
the peak is that of the emulated replica here (62.5 µs a token), which happens to be near their 15,928.
"""

import random
from collections.abc import Sequence

from router.routing.decision import Decision
from router.routing.in_flight import InFlight
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.pending_prefill import PendingPrefill
from sim.rivals.rule import Rule, decision, least

AFFINITY_SHARE = 0.80
MAX_EXTRA_WAIT_S = 18.0
PEAK_TOKENS_PER_S = 16_000.0
MOST_TOKENS = 4_194_304
"""Tokens in flight at which the score ends."""


class LlmdSticky(Rule):
    """Promise: a sticky candidate is left only if it would wait 18 s longer than the best other."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._pending = PendingPrefill()

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """Filter, then the least tokens in flight."""
        pending, matched, tokens = self._pending.tokens, request.matched_tokens, request.prompt_tokens
        sticky = [c for c in candidates if matched[c.index] >= AFFINITY_SHARE * tokens]
        others = [c for c in candidates if matched[c.index] < AFFINITY_SHARE * tokens]
        considered: Sequence[ReplicaState] = sticky or candidates
        if sticky and others:
            warm = min(pending(c.index) for c in sticky)
            cold = min(pending(c.index) for c in others)
            if (warm - cold) / PEAK_TOKENS_PER_S > MAX_EXTRA_WAIT_S:
                considered = candidates
        loads = [min(1.0, (pending(c.index) + tokens - matched[c.index]) / MOST_TOKENS) for c in considered]
        return decision(request, candidates, least(loads, considered, self.rng))

    def sent(self, flight: InFlight, now: float) -> None:
        """Its uncached tokens are in flight."""
        self._pending.sent(flight)

    def first_token(self, flight: InFlight, now: float) -> None:
        """They are released at the first chunk."""
        self._pending.done(flight)

    def over(self, flight: InFlight, now: float) -> None:
        """They are gone."""
        self._pending.done(flight)
