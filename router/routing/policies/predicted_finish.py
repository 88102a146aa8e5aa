"""The priced rule: least delay for this request and for those it delays.

For every candidate j, in seconds::

    cost(j) = W_j + T_j                                   my first token
            + T_j * lambda_j                              first tokens of later arrivals my prefill delays
            + T_j * kappa * (R_j + Q_j)                   running streams my prefill stalls
            + kappa * o * step_j / (1 - rho_j)            my own decoding there
            + (1 + lambda_j) * K_j                        KV room, when j is nearly full

    lambda_j = min(8, A / N * (W_j + T_j) / (1 - rho_fleet))

rho is per replica in the decode term and fleet-wide in lambda; swapped, the gain is lost
(docs/routing.md). Derivation and evidence: docs/routing.md.

Worked example: lambda = 1, kappa = 0.05, A idle with nothing cached (T = 0.60), home H with 20 streams,
0.90 s of queue and a hit that leaves T = 0.10; own decoding costs the same on both::

    cost(H) = 0.90 + 0.10 * (1 + 1 + 0.05 * 20) = 1.20
    cost(A) = 0.00 + 0.60 * (1 + 1)             = 1.20     one millisecond more at home and it spills
"""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.view import Candidate, RoutingRequest

MAX_LATER_ARRIVALS = 8.0


class PredictedFinish:
    """Promise: no candidate that was not chosen would have cost less in total."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> Decision:
        """The candidate of least total cost; ties at random."""
        matched_by, price = request.matched_tokens, self._price
        best, ties = candidates[0], 1
        best_wait, best_prefill, best_imposed = price(request, best)
        least = best_wait + best_prefill + best_imposed
        longest = matched_by[best.index]
        for candidate in candidates[1:]:
            wait, prefill, imposed = price(request, candidate)
            total = wait + prefill + imposed
            if matched_by[candidate.index] > longest:
                longest = matched_by[candidate.index]
            if total > least:
                continue
            if total == least:
                ties += 1
                if self._rng.random() * ties >= 1.0:
                    continue
            else:
                ties = 1
            best, least, best_wait, best_prefill = candidate, total, wait, prefill
        matched = matched_by[best.index]
        if not longest:
            return Decision(best.index, Reason.COLD, 0, best_wait, best_prefill)
        saved = best.cost.prefill_s(request.prompt_tokens, 0) - best_prefill if matched else 0.0
        if matched == longest:
            return Decision(best.index, Reason.WARM, matched, best_wait, best_prefill, saved)
        warmest = min(
            (self._price(request, c) for c in candidates if matched_by[c.index] == longest), key=sum
        )
        return Decision(
            best.index,
            Reason.SPILL,
            matched,
            best_wait,
            best_prefill,
            saved,
            best_prefill - warmest[1],
            warmest[0] - best_wait,
        )

    def assess(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Every candidate's cost (module docstring)."""
        rows = []
        for candidate in candidates:
            wait, prefill, imposed = self._price(request, candidate)
            rows.append(
                Assessment(
                    candidate.index,
                    request.matched_tokens[candidate.index],
                    wait,
                    prefill,
                    imposed,
                    wait + prefill + imposed,
                )
            )
        return rows

    @staticmethod
    def _price(request: RoutingRequest, candidate: Candidate) -> tuple[float, float, float]:
        """Seconds of wait, of prefill, and of delay imposed on others and on the own decoding."""
        now, ledger, cost = request.now, candidate.ledger, candidate.cost
        matched = request.matched_tokens[candidate.index]
        wait = ledger.backlog_s(now)
        prefill = cost.prefill_s(request.prompt_tokens - matched, matched)
        later = request.later_arrivals_per_s * (wait + prefill)
        if later > MAX_LATER_ARRIVALS:
            later = MAX_LATER_ARRIVALS
        streams, kappa = ledger.decoding, request.decode_price
        imposed = prefill * (later + kappa * (streams + ledger.queued)) + (
            kappa * request.expected_output_tokens * cost.step_s(streams) / (1.0 - ledger.utilization(now))
        )
        room = candidate.room_price_s
        return wait, prefill, imposed + (1.0 + later) * room if room else imposed
