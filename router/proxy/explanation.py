"""A decision as JSON and as lines for people: one row per candidate, and the sums to check it with."""

from typing import Any

from router.proxy.kv_route_report import kv_route, kv_route_line
from router.routing.calibration import ReplicaCost
from router.routing.decision import Assessment, Decision
from router.routing.flat_request import whole_request
from router.routing.fleet import Fleet
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest

_NO_PROMPT = "no prompt found; expected an OpenAI request body with messages, prompt or input"
_NO_OBJECT = "the body is not a JSON object; expected an OpenAI request body with messages, prompt or input"

ENOUGH_SEEN = 20
"""First tokens (steps) after which it says something how far off predictions were: the mean is over about as
many, and the first ones are predicted by the prior alone."""


def no_prompt(body: bytes) -> str:
    """Why there is nothing to explain of ``body``, in which no prompt was found."""
    return _NO_OBJECT if whole_request(body) is None else _NO_PROMPT


def explanation(
    fleet: Fleet, decision: Decision, rows: list[Assessment], request: RoutingRequest
) -> dict[str, Any]:
    """What ``POST /explain`` answers; times in milliseconds."""
    chosen = fleet.replicas[decision.replica]
    others = [row for row in rows if row.replica != decision.replica]
    own = next((row for row in rows if row.replica == decision.replica), None)
    best = min(others, key=lambda row: row.total_s, default=None)
    return {
        "replica": chosen.name,
        "reason": decision.reason.value,
        "prompt_tokens": request.prompt_tokens,
        "matched_tokens": decision.matched_tokens,
        "wait_ms": _ms(decision.wait_s),
        "prefill_ms": _ms(decision.prefill_s),
        "saved_ms": _ms(decision.saved_s),
        "spill_saved_ms": None if decision.spill_saved_s is None else _ms(decision.spill_saved_s),
        "extra_wait_ms": None if decision.extra_wait_s is None else _ms(decision.extra_wait_s),
        "kv": kv_route(fleet, decision),
        "best_other": None
        if best is None or own is None
        else {
            "replica": fleet.replicas[best.replica].name,
            "saved_ms": _ms(best.prefill_s - own.prefill_s),
            "extra_wait_ms": _ms(own.wait_s - best.wait_s),
            "total_more_ms": _ms(best.total_s - own.total_s),
        },
        "prices": {
            "arrivals_per_replica_s": round(request.arrivals_per_replica_s, 4),
            "fleet_utilization": round(request.fleet_utilization, 4),
            "decode_price": round(request.decode_price, 5),
            "expected_output_tokens": round(request.expected_output_tokens, 1),
            "copy_price": round(request.copy_price, 4),
            "universal_tokens": request.universal_tokens,
        },
        "candidates": [_candidate(fleet, row, request) for row in rows],
        "left_out": _left_out(fleet, rows, request.prompt),
    }


def _left_out(fleet: Fleet, rows: list[Assessment], prompt: Prompt | None) -> list[dict[str, str]]:
    """The replicas that are no candidates, each with the reason."""
    candidates = {row.replica for row in rows}
    model = None if prompt is None else prompt.model
    return [
        {"replica": replica.name, "reason": _why_left_out(replica, model)}
        for replica in fleet.replicas
        if replica.index not in candidates
    ]


def _why_left_out(replica: ReplicaState, model: str | None) -> str:
    if replica.leaving:
        return "leaving"
    if replica.draining:
        return "draining"
    if model is not None and not replica.serves(model):
        return "other model"
    if not replica.usable:
        return replica.health.state.value
    return "resting" if replica.resting else "tenants would share its cache"


def _candidate(fleet: Fleet, row: Assessment, request: RoutingRequest) -> dict[str, Any]:
    replica = fleet.replicas[row.replica]
    guard = None if request.prompt is None else fleet.guard_prices(replica, request.prompt, request.now)
    return {
        "replica": replica.name,
        "role": replica.role.value,
        "matched_tokens": row.matched_tokens,
        "queued": replica.ledger.queued,
        "decoding": replica.ledger.decoding,
        "held": len(replica.held),
        "held_behind": replica.held.behind(
            replica.held.rank_s(row.prefill_s, request.prompt), request.prompt
        ),
        "step_ms": _ms(replica.cost.step_s(replica.ledger.decoding)),
        "utilization": round(replica.ledger.load, 4),
        "wait_ms": _ms(row.wait_s),
        "prefill_ms": _ms(row.prefill_s),
        "imposed_ms": _ms(row.imposed_s),
        "total_ms": _ms(row.total_s),
        "cost": cost_fit(replica.cost),
        "guard": None if guard is None else {"lost_ms": _ms(guard.lost_s), "wait_ms": _ms(guard.wait_s)},
    }


def cost_fit(cost: ReplicaCost) -> dict[str, Any]:
    """What ``prefill_ms`` and ``step_ms`` are made of on one replica, in the units of ``cost:``, and how far
    off such predictions were lately: ``None`` before ``ENOUGH_SEEN`` were."""
    fit = cost.fit
    return {
        "prefill_fixed_ms": _ms(fit.prefill_fixed_s),
        "prefill_us_per_token": round(1e6 * fit.prefill_per_token_s, 4),
        "attention_tokens": round(fit.attention_tokens),
        "decode_step_ms": _ms(fit.step_fixed_s),
        "decode_us_per_sequence": round(1e6 * fit.step_per_sequence_s, 3),
        "prefill_error": round(fit.prefill_error, 4) if cost.prefills_seen >= ENOUGH_SEEN else None,
        "prefill_doubt": round(cost.doubt, 4),
        "step_error": round(fit.step_error, 4) if cost.steps_seen >= ENOUGH_SEEN else None,
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The same as a table for a terminal."""
    out = [
        f"{result['prompt_tokens']} prompt tokens -> {result['replica']} ({result['reason']}): "
        f"{result['matched_tokens']} matched, saves {result['saved_ms']:.1f} ms of prefill",
        f"{'replica':24}{'matched':>9}{'wait ms':>10}{'prefill ms':>12}{'imposed ms':>12}{'total ms':>10}",
    ]
    for row in result["candidates"]:
        mark = " <" if row["replica"] == result["replica"] else ""
        out.append(
            f"{row['replica']:24}{row['matched_tokens']:>9}{row['wait_ms']:>10.1f}{row['prefill_ms']:>12.1f}"
            f"{row['imposed_ms']:>12.1f}{row['total_ms']:>10.1f}{mark}"
        )
    if result["left_out"]:
        out.append(
            "left out: " + ", ".join(f"{one['replica']} ({one['reason']})" for one in result["left_out"])
        )
    cost = next((row["cost"] for row in result["candidates"] if row["replica"] == result["replica"]), None)
    if cost is not None:
        out.append(
            f"there: prefill {cost['prefill_fixed_ms']:.1f} ms + {cost['prefill_us_per_token']:.1f} us a "
            f"token (twice that at {cost['attention_tokens']:,}){_lately(cost['prefill_error'])}; "
            f"a step {cost['decode_step_ms']:.1f} ms + {cost['decode_us_per_sequence']:.0f} us a request"
            f"{_lately(cost['step_error'])}"
        )
    prices = result["prices"]
    out.append(
        f"prices: {prices['arrivals_per_replica_s']} arrivals/s a replica, fleet utilization "
        f"{prices['fleet_utilization']}, decode price {prices['decode_price']}, "
        f"{prices['expected_output_tokens']} expected reply tokens"
    )
    if prices["copy_price"] < 1.0:
        out.append(f"hot prefix: a copy counts {prices['copy_price']:.0%} of its price on others")
    if result["kv"] is not None:
        out.append(kv_route_line(result["kv"]))
    best = result["best_other"]
    if best is not None and not any((best["saved_ms"], best["extra_wait_ms"], best["total_more_ms"])):
        out.append(f"{best['replica']} would be as good")
    elif best is not None:
        out.append(
            f"against {best['replica']}: {best['saved_ms']:.1f} ms less prefill "
            f"for {best['extra_wait_ms']:.1f} ms more queue, "
            + (
                f"{best['total_more_ms']:.1f} ms less in total"
                if best["total_more_ms"] >= 0.0
                else f"{-best['total_more_ms']:.1f} ms more in total (policies that "
                "compare totals take turns among idle replicas that differ by less than is in doubt)"
            )
        )
    if result["extra_wait_ms"] is not None:
        out.append(
            f"the warmest replica would have saved {result['spill_saved_ms']:.1f} ms of prefill "
            f"for {result['extra_wait_ms']:.1f} ms more queue"
        )
    return out


def _lately(error: float | None) -> str:
    return "" if error is None else f", lately off by {error:.0%}"


def _ms(seconds: float) -> float:
    return round(seconds * 1_000.0, 3)
