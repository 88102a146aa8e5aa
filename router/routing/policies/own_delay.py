"""What a candidate would cost one request itself, without prices: wait and prefill."""

from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


def assess_own_delay(request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
    """Wait and prefill on every candidate; nothing is imposed, the total is their sum."""
    rows = []
    for candidate in candidates:
        matched = request.matched_tokens[candidate.index]
        prefill = candidate.cost.prefill_s(request.prompt_tokens - matched, matched)
        wait = candidate.wait_s(prefill, request.prompt, request.now)
        rows.append(Assessment(candidate.index, matched, wait, prefill, 0.0, wait + prefill))
    return rows


def decide_by_load(request: RoutingRequest, chosen: ReplicaState) -> Decision:
    """The decision of a policy that looks at load alone."""
    matched = request.matched_tokens[chosen.index]
    prefill = chosen.cost.prefill_s(request.prompt_tokens - matched, matched)
    wait = chosen.wait_s(prefill, request.prompt, request.now)
    saved = chosen.cost.prefill_s(request.prompt_tokens, 0) - prefill if matched else 0.0
    return Decision(chosen.index, Reason.BALANCED, matched, wait, prefill, saved)
