"""Stay with the warm replica until the extra wait there exceeds the prefill the hit saves.

Home H is the candidate with the longest match, A the best of the others. The request leaves home when::

    W_H - W_A  >  (1 + price) * (T_A - T_H)

W is the prefill backlog, T the request's own prefill there. The right side is the spill threshold; with
``price`` 0 it is the break-even of this request alone. Example: 31 µs a token, 2,900 of 3,300 tokens
cached at home, so T_A - T_H = 90 ms. 60 ms more queue at home: stay. 120 ms: spill.

What most of the traffic begins with (``universal_head.py``) is nobody's home: a replica that has just joined
would never get any of it. So where home holds little more, one that lacks it and has next to nothing to do is
asked.
"""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.policies.load_measure import idle_below
from router.routing.policies.own_delay import assess_own_delay
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.universal_head import MOST_PAST_HEAD
from router.routing.view import RoutingRequest


class PrefixAffinity:
    """Promise: home is left only if the extra wait there exceeds the spill threshold, or for a replica with
    next to nothing to do that lacks what most of the traffic begins with."""

    samples = True

    def __init__(self, rng: random.Random, price: float = 1.0) -> None:
        self._rng = rng
        self._price = price

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """Home, or the best other candidate when waiting at home costs more than its hit saves."""
        rows = assess_own_delay(request, candidates)
        tokens = {candidate.index: candidate.outstanding_tokens for candidate in candidates}
        doubts = {candidate.index: candidate.cost.doubt for candidate in candidates}
        longest = max(row.matched_tokens for row in rows)
        if longest == 0:
            chosen = self._least(rows, tokens, doubts)
            return Decision(chosen.replica, Reason.COLD, 0, chosen.wait_s, chosen.prefill_s, 0.0)
        home = self._least([row for row in rows if row.matched_tokens == longest], tokens, doubts)
        cold = {candidate.index: candidate.cost for candidate in candidates}
        others = [row for row in rows if row.replica != home.replica]
        best = self._least(others, tokens, doubts) if others else home
        extra_wait = home.wait_s - best.wait_s
        lost = best.prefill_s - home.prefill_s
        spill = extra_wait > (1.0 + self._price) * lost and best.replica != home.replica
        newcomer = None if spill else self._newcomer(request, rows, tokens, doubts, longest)
        if newcomer is not None:
            best, spill = newcomer, True
            extra_wait, lost = home.wait_s - best.wait_s, best.prefill_s - home.prefill_s
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

    def _newcomer(
        self,
        request: RoutingRequest,
        rows: Sequence[Assessment],
        tokens: dict[int, int],
        doubts: dict[int, float],
        longest: int,
    ) -> Assessment | None:
        """One with next to nothing to do that lacks the universal head, if home holds little more."""
        universal = request.universal_tokens
        if longest > MOST_PAST_HEAD * universal:
            return None
        idle = idle_below(sum(tokens.values()), len(tokens))
        lack = [row for row in rows if row.matched_tokens < universal and tokens[row.replica] < idle]
        return self._least(lack, tokens, doubts) if lack else None

    def _least(
        self, rows: Sequence[Assessment], tokens: dict[int, int], doubts: dict[int, float]
    ) -> Assessment:
        """The least of wait and prefill. What is learned of equal replicas differs by as much as is in doubt:
        of those alike, that hold the same, the one with fewest outstanding ``tokens``; ties at random."""
        first = min(rows, key=_total)
        least, matched = first.total_s, first.matched_tokens
        alike = [
            row
            for row in rows
            if row.matched_tokens == matched and row.total_s <= least * (1.0 + doubts[row.replica])
        ]
        fewest = min([tokens[row.replica] for row in alike])
        best = [row for row in alike if tokens[row.replica] == fewest]
        return best[0] if len(best) == 1 else self._rng.choice(best)

    def copy(self) -> "PrefixAffinity":
        """An independent one in the same state."""
        return PrefixAffinity(same_state(self._rng), self._price)

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill on every candidate."""
        return assess_own_delay(request, candidates)


def _total(row: Assessment) -> float:
    return row.total_s
