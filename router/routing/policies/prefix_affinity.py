"""Stay with the warm replica until the extra wait there exceeds the prefill the hit saves.

Home H is the candidate with the longest match, A the best of the others. The request leaves home when::

    W_H - W_A  >  (1 + price) * (T_A - T_H)

W is the prefill backlog, T the request's own prefill there. The right side is the spill threshold; with
``price`` 0 it is the break-even of this request alone. Example: 31 µs a token, 2,900 of 3,300 tokens
cached at home, so T_A - T_H = 90 ms. 60 ms more queue at home: stay. 120 ms: spill.
"""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.policies.own_delay import assess_own_delay
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class PrefixAffinity:
    """Promise: home is left only if the extra wait there exceeds the spill threshold."""

    samples = True

    def __init__(self, rng: random.Random, price: float = 1.0) -> None:
        self._rng = rng
        self._price = price

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """Home, or the best other candidate when waiting at home costs more than its hit saves."""
        rows = assess_own_delay(request, candidates)
        longest = max(row.matched_tokens for row in rows)
        if longest == 0:
            chosen = self._least(rows)
            return Decision(chosen.replica, Reason.COLD, 0, chosen.wait_s, chosen.prefill_s, 0.0)
        home = self._least([row for row in rows if row.matched_tokens == longest])
        cold = {candidate.index: candidate.cost for candidate in candidates}
        others = [row for row in rows if row.replica != home.replica]
        best = self._least(others) if others else home
        extra_wait = home.wait_s - best.wait_s
        lost = best.prefill_s - home.prefill_s
        spill = extra_wait > (1.0 + self._price) * lost and best.replica != home.replica
        chosen = best if spill else home
        saved = cold[chosen.replica].prefill_s(request.prompt_tokens, 0) - chosen.prefill_s
        if spill and chosen.matched_tokens < longest:
            return Decision(
                chosen.replica,
                Reason.SPILL,
                chosen.matched_tokens,
                chosen.wait_s,
                chosen.prefill_s,
                saved,
                lost,
                extra_wait,
            )
        return Decision(
            chosen.replica, Reason.WARM, chosen.matched_tokens, chosen.wait_s, chosen.prefill_s, saved
        )

    def _least(self, rows: Sequence[Assessment]) -> Assessment:
        least = min(row.total_s for row in rows)
        best = [row for row in rows if row.total_s == least]
        return best[0] if len(best) == 1 else self._rng.choice(best)

    def copy(self) -> "PrefixAffinity":
        """An independent one in the same state."""
        return PrefixAffinity(same_state(self._rng), self._price)

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill on every candidate."""
        return assess_own_delay(request, candidates)
