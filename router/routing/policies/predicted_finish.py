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
        rows = self.assess(request, candidates)
        best = rows[0]
        warmest = rows[0]
        ties = 1
        for row in rows[1:]:
            if row.total_s < best.total_s:
                best, ties = row, 1
            elif row.total_s == best.total_s:
                ties += 1
                if self._rng.random() * ties < 1.0:
                    best = row
            if row.matched_tokens > warmest.matched_tokens or (
                row.matched_tokens == warmest.matched_tokens and row.total_s < warmest.total_s
            ):
                warmest = row
        matched = best.matched_tokens
        if not warmest.matched_tokens:
            return Decision(best.replica, Reason.COLD, 0, best.wait_s, best.prefill_s)
        cost = next(c.cost for c in candidates if c.index == best.replica)
        saved = cost.prefill_s(request.prompt_tokens, 0) - best.prefill_s if matched else 0.0
        if matched == warmest.matched_tokens:
            return Decision(best.replica, Reason.WARM, matched, best.wait_s, best.prefill_s, saved)
        return Decision(
            best.replica,
            Reason.SPILL,
            matched,
            best.wait_s,
            best.prefill_s,
            saved,
            best.prefill_s - warmest.prefill_s,
            warmest.wait_s - best.wait_s,
        )

    def assess(self, request: RoutingRequest, candidates: Sequence[Candidate]) -> list[Assessment]:
        """Every candidate's cost, term by term (module docstring)."""
        now, tokens, matched_by = request.now, request.prompt_tokens, request.matched_tokens
        arrivals = request.arrivals_per_replica_s / (1.0 - request.fleet_utilization)
        kappa, output = request.decode_price, request.expected_output_tokens
        rows = []
        for candidate in candidates:
            ledger, cost = candidate.ledger, candidate.cost
            matched = matched_by[candidate.index]
            wait = ledger.backlog_s(now)
            prefill = cost.prefill_s(tokens - matched, matched)
            later = arrivals * (wait + prefill)
            if later > MAX_LATER_ARRIVALS:
                later = MAX_LATER_ARRIVALS
            streams = ledger.decoding
            imposed = (
                prefill * (later + kappa * (streams + ledger.queued))
                + kappa * output * cost.step_s(streams) / (1.0 - ledger.utilization(now))
                + (1.0 + later) * candidate.room_price_s
            )
            rows.append(
                Assessment(candidate.index, matched, wait, prefill, imposed, wait + prefill + imposed)
            )
        return rows
