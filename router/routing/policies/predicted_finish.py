"""The priced rule: least delay for this request and for those it delays.

For every candidate j, in seconds::

    cost(j) = W_j + T_j                                   my first token
            + T_j * lambda_j                              first tokens of later arrivals my prefill delays
            + T_j * kappa / (1 - rho_fleet) * (R_j + Q_j) running streams my prefill stalls
            + kappa * o * step_j / (1 - rho_j)            my own decoding there
            + (1 + lambda_j) * K_j * (m_j + o) / (n + o)  KV room I take, when j is nearly full

    lambda_j = min(32, A / N * (W_j + T_j) / (1 - rho_fleet))

A stalled stream stays longer, and what is prefilled meanwhile stalls it again: hence the 1 - rho_fleet.
Of n prompt tokens those that j holds take no room: m_j are new, and o are expected of the reply.

Of a hot prefix's copy (``heat.py``) only a share is priced: in the prices above T_j is then T of a replica
that holds the prefix, plus that share of what computing it again takes.

What most of the traffic begins with (``universal_head.py``) is nobody's home: a replica that lacks it and
has less than a quarter of the mean of outstanding tokens, as one that has just joined, is priced as if it
held that, in all of the above. The first request computes it there; from then on it is held.

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
from router.routing.policies.load_measure import idle_below
from router.routing.policies.same_state import same_state
from router.routing.replica_state import ReplicaState
from router.routing.universal_head import MOST_PAST_HEAD
from router.routing.view import MatchedTokens, RoutingRequest

MAX_LATER_ARRIVALS: Final = 32.0


class PredictedFinish:
    """Promise: no candidate that was not chosen would have cost less in total, unless it is idle and alike.

    What is learned of equal replicas differs by a few percent, or by more where little was seen or times vary
    (``ReplicaCost.doubt``). On a quiet day the one that looks fastest would get every cold request, its cache
    would fill while the others' stay empty, and nothing would show that the others are as fast.
    """

    samples = True

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._costs: list[_Cost] = []
        """Of the candidates of the decision being made, in their order; more from larger ones before."""

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The candidate of least total cost; ties at random."""
        costs, count = self._costs, len(candidates)
        self._price(request, candidates)
        best = costs[0]
        least = best.total_s
        ties, longest = 0, 0
        for i in range(count):
            one = costs[i]
            if one.total_s < least:
                best, ties, least = one, 1, one.total_s
            elif one.total_s == least:
                ties += 1
            if one.matched_tokens > longest:
                longest = one.matched_tokens
        if ties > 1:
            best = self._one_of([one for one in costs[:count] if one.total_s == least])
        elif best.idle:
            matched = best.matched_tokens
            best = self._one_of(
                [
                    one
                    for one in costs[:count]
                    if one.idle
                    and one.matched_tokens == matched
                    and one.total_s <= least * (1.0 + candidates[one.place].cost.doubt)
                ]
            )
        index, matched, wait, prefill = best.replica, best.matched_tokens, best.wait_s, best.prefill_s
        if not longest:
            return Decision(index, Reason.COLD, 0, wait, prefill)
        saved = 0.0
        if matched:
            saved = candidates[best.place].cost.prefill_s(request.prompt_tokens, 0) - prefill
        if matched == longest:
            return Decision(index, Reason.WARM, matched, wait, prefill, saved)
        if best.newcomer and longest <= MOST_PAST_HEAD * request.universal_tokens:
            return Decision(index, Reason.BALANCED, matched, wait, prefill, saved)
        warmest = best
        for i in range(count):
            one = costs[i]
            if one.matched_tokens == longest and (warmest is best or one.total_s < warmest.total_s):
                warmest = one
        return Decision(
            index,
            Reason.SPILL,
            matched,
            wait,
            prefill,
            saved,
            prefill - warmest.prefill_s,
            warmest.wait_s - wait,
        )

    def _one_of(self, alike: "list[_Cost]") -> "_Cost":
        return alike[int(self._rng.random() * len(alike))] if len(alike) > 1 else alike[0]

    def copy(self) -> "PredictedFinish":
        """An independent one in the same state."""
        return PredictedFinish(same_state(self._rng))

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Every candidate's cost (module docstring)."""
        self._price(request, candidates)
        return [
            Assessment(
                one.replica,
                one.matched_tokens,
                one.wait_s,
                one.prefill_s,
                one.total_s - one.wait_s - one.prefill_s,
                one.total_s,
            )
            for one in self._costs[: len(candidates)]
        ]

    def _price(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> None:
        """Write every candidate's cost into ``_costs``. Every decision's hot loop."""
        costs = self._costs
        while len(costs) < len(candidates):
            costs.append(_Cost(len(costs)))
        now, tokens, matched_by = request.now, request.prompt_tokens, request.matched_tokens
        arrivals, kappa = request.later_arrivals_per_s, request.decode_price
        stall_price = kappa / (1.0 - request.fleet_utilization)
        output_tokens = request.expected_output_tokens
        decode_price = kappa * output_tokens
        copy_price, prompt = request.copy_price, request.prompt
        by_level: MatchedTokens | None = matched_by if isinstance(matched_by, MatchedTokens) else None
        longest = 0
        if copy_price < 1.0:
            longest = max(matched_by) if by_level is None else by_level.longest
        universal, idle = request.universal_tokens, 0.0
        if universal:
            outstanding = sum([candidate.outstanding_tokens for candidate in candidates])
            idle = idle_below(outstanding, len(candidates))
        by_replica: list[int] | None = matched_by if isinstance(matched_by, list) else None
        rows: list[ReplicaState] = candidates if isinstance(candidates, list) else list(candidates)
        for place, candidate in enumerate(rows):
            out = costs[place]
            ledger, cost, index = candidate.ledger, candidate.cost, candidate.index
            if by_replica is not None:
                matched = by_replica[index]
            else:
                matched = matched_by[index] if by_level is None else by_level.of(index)
            prefill = cost.prefill_s(tokens - matched, matched)
            wait = ledger.backlog_s(now)
            held = candidate.held
            in_flight, behind = ledger.in_flight + held.count, 0
            if held.count:
                rank = held.rank_s(prefill, prompt) if matched else prefill
                wait += held.ahead_s(rank, prompt)
                behind = held.behind(rank, prompt)
            newcomer = matched < universal and candidate.outstanding_tokens < idle
            if newcomer:
                prefill = cost.prefill_s(tokens - universal, universal)
            own = wait + prefill
            later = arrivals * own
            if later > MAX_LATER_ARRIVALS:
                later = MAX_LATER_ARRIVALS
            priced = prefill
            if matched < longest and not newcomer:
                hit = cost.prefill_s(tokens - longest, longest)
                priced = hit + copy_price * (prefill - hit)
            total = (
                own
                + priced * (later + behind + stall_price * in_flight)
                + decode_price * cost.step_s(ledger.decoding) / (1.0 - ledger.load)
            )
            if candidate.room_price_s:
                taken = tokens - (universal if newcomer else matched) + output_tokens
                total += (1.0 + later) * candidate.room_price_s * taken / (tokens + output_tokens)
            out.replica = index
            out.matched_tokens = matched
            out.wait_s = wait
            out.prefill_s = cost.prefill_s(tokens - matched, matched) if newcomer else prefill
            out.newcomer = newcomer
            out.total_s = total
            out.idle = not in_flight


class _Cost:
    """What one candidate costs. Kept between decisions: compiled, numbers in it are no objects."""

    __slots__ = ("idle", "matched_tokens", "newcomer", "place", "prefill_s", "replica", "total_s", "wait_s")

    def __init__(self, place: int) -> None:
        self.place = place
        """Among the candidates."""
        self.replica = 0
        self.matched_tokens = 0
        self.wait_s = 0.0
        self.prefill_s = 0.0
        self.total_s = 0.0
        self.idle = False
        """Nothing is in flight or held there."""
        self.newcomer = False
        """Priced as if it held what most of the traffic begins with."""
