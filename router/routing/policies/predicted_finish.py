"""The priced rule: least delay for this request and for those it delays.

For every candidate j, in seconds::

    cost(j) = W_j + T_j                                   my first token
            + T_j * lambda_j                              first tokens of later arrivals my prefill delays
            + T_j * kappa / (1 - rho_fleet) * (R_j + Q_j) running streams my prefill stalls
            + kappa * o * step_j / (1 - rho_j)            my own decoding there
            + (1 + lambda_j) * K_j                        KV room, when j is nearly full

    lambda_j = min(32, A / N * (W_j + T_j) / (1 - rho_fleet))

A stalled stream stays longer, and what is prefilled meanwhile stalls it again: hence the 1 - rho_fleet.

Of a hot prefix's copy (``heat.py``) only a share is priced: in the prices above T_j is then T of a replica
that holds the prefix, plus that share of what computing it again takes.

Where requests are held in the router (``hold_queue.py``), W_j counts those that would go first, Q_j counts
all that are held, and each one behind adds T_j: it waits that much longer for certain.

rho is per replica in the decode term and fleet-wide in lambda; swapped, the gain is lost
(docs/routing.md). Derivation and evidence: docs/routing.md.

Worked example: lambda = 1, kappa = 0.05, A idle with nothing cached (T = 0.60), home H with 20 streams,
0.90 s of queue and a hit that leaves T = 0.10; own decoding costs the same on both::

    cost(H) = 0.90 + 0.10 * (1 + 1 + 0.05 * 20) = 1.20
    cost(A) = 0.00 + 0.60 * (1 + 1)             = 1.20     one millisecond more at home and it spills
"""

import random
from collections.abc import Sequence
from typing import Final

from router.routing.decision import Assessment, Decision, Reason
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest

MAX_LATER_ARRIVALS: Final = 32.0
IDLE_ALIKE: Final = 1.1
"""Idle replicas that hold the same of a prompt share it if their costs differ by no more than this."""


class PredictedFinish:
    """Promise: no candidate that was not chosen would have cost less in total, unless it is idle and alike.

    What is learned of equal replicas differs by a few percent. On a quiet day the one that looks fastest
    would get every cold request, and its cache would fill while the others' stay empty.
    """

    samples = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The candidate of least total cost; ties at random."""
        matches, waits, prefills, totals = self._costs(request, candidates)
        best, ties, longest = 0, 0, 0
        least = totals[0]
        for i, total in enumerate(totals):
            if total < least:
                best, ties, least = i, 1, total
            elif total == least:
                ties += 1
            if matches[i] > longest:
                longest = matches[i]
        if ties > 1:
            best = self._one_of([i for i, total in enumerate(totals) if total == least])
        elif not candidates[best].ledger.in_flight and not candidates[best].held:
            limit, matched = IDLE_ALIKE * least, matches[best]
            best = self._one_of(
                [
                    i
                    for i, total in enumerate(totals)
                    if total <= limit
                    and matches[i] == matched
                    and not candidates[i].ledger.in_flight
                    and not candidates[i].held
                ]
            )
        chosen, wait, prefill = candidates[best], waits[best], prefills[best]
        matched = matches[best]
        if not longest:
            return Decision(chosen.index, Reason.COLD, 0, wait, prefill)
        saved = chosen.cost.prefill_s(request.prompt_tokens, 0) - prefill if matched else 0.0
        if matched == longest:
            return Decision(chosen.index, Reason.WARM, matched, wait, prefill, saved)
        warmest = min((i for i, tokens in enumerate(matches) if tokens == longest), key=totals.__getitem__)
        return Decision(
            chosen.index,
            Reason.SPILL,
            matched,
            wait,
            prefill,
            saved,
            prefill - prefills[warmest],
            waits[warmest] - wait,
        )

    def _one_of(self, alike: list[int]) -> int:
        return alike[int(self._rng.random() * len(alike))] if len(alike) > 1 else alike[0]

    def copy(self) -> "PredictedFinish":
        """An independent one in the same state."""
        return PredictedFinish(same_state(self._rng))

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Every candidate's cost (module docstring)."""
        return [
            Assessment(candidate.index, matched, wait, prefill, total - wait - prefill, total)
            for candidate, matched, wait, prefill, total in zip(
                candidates, *self._costs(request, candidates), strict=True
            )
        ]

    @staticmethod
    def _costs(
        request: RoutingRequest, candidates: Sequence[ReplicaState]
    ) -> tuple[list[int], list[float], list[float], list[float]]:
        """By candidate: matched tokens, seconds of wait, of prefill, in total. Every decision's hot loop."""
        now, tokens, matched_by = request.now, request.prompt_tokens, request.matched_tokens
        arrivals, kappa = request.later_arrivals_per_s, request.decode_price
        stall_price = kappa / (1.0 - request.fleet_utilization)
        decode_price = kappa * request.expected_output_tokens
        copy_price, prompt = request.copy_price, request.prompt
        longest = max(matched_by) if copy_price < 1.0 else 0
        matches, waits, prefills, totals = [], [], [], []
        for candidate in candidates:
            ledger, cost = candidate.ledger, candidate.cost
            matched = matched_by[candidate.index]
            prefill = cost.prefill_s(tokens - matched, matched)
            wait = ledger.backlog_s(now)
            in_flight, behind = ledger.in_flight, 0
            if held := candidate.held:
                wait += held.ahead_s(prefill, prompt)
                in_flight += len(held)
                behind = held.behind(prefill, prompt)
            own = wait + prefill
            later = arrivals * own
            if later > MAX_LATER_ARRIVALS:
                later = MAX_LATER_ARRIVALS
            priced = prefill
            if matched < longest:
                hit = cost.prefill_s(tokens - longest, longest)
                priced = hit + copy_price * (prefill - hit)
            total = (
                own
                + priced * (later + behind + stall_price * in_flight)
                + decode_price * cost.step_s(ledger.decoding) / (1.0 - ledger.load)
            )
            if candidate.room_price_s:
                total += (1.0 + later) * candidate.room_price_s
            matches.append(matched)
            waits.append(wait)
            prefills.append(prefill)
            totals.append(total)
        return matches, waits, prefills, totals
