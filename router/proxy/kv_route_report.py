"""A decision's way for KV as people see it: in ``/explain``, ``/decisions`` and traces."""

from typing import Any

from router.routing.decision import Decision
from router.routing.fleet import Fleet


def kv_route(fleet: Fleet, decision: Decision) -> dict[str, Any] | None:
    """Which step this is, who is at the other end, both prices in milliseconds; None where no KV moves."""
    route = decision.route
    if route is None:
        return None
    other = None if route.other is None else fleet.replicas.by_index.get(route.other)
    return {
        "step": route.step.value,
        "other": None if other is None else other.name,
        "moved_tokens": route.moved_tokens,
        "transfer_ms": _ms(route.transfer_s),
        "decode_wait_ms": _ms(route.decode_wait_s),
        "one_step_ms": _ms(route.one_step_s),
        "two_steps_ms": _ms(route.two_steps_s),
    }


def kv_route_line(route: dict[str, Any]) -> str:
    """The same as a line for a terminal."""
    said = {
        "direct": "one step: it computes what it lacks",
        "pull": f"one step: it pulls {route['moved_tokens']} tokens from {route['other']}",
        "prefill": f"two steps: {route['other']} pulls {route['moved_tokens']} tokens from it and answers",
    }[route["step"]]
    prices = [
        f"{name} {route[key]:.1f} ms"
        for name, key in (("one step", "one_step_ms"), ("two steps", "two_steps_ms"))
        if route[key] is not None
    ]
    transfer = f" ({route['transfer_ms']:.1f} ms of transfer)" if route["moved_tokens"] else ""
    return f"KV, {said}{transfer}; in total: {', '.join(prices) or 'not compared'}"


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1e3 * seconds, 3)
