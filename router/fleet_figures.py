"""Figures for people out of what ``/fleet`` of a running router answers. Pure."""

from collections.abc import Sequence
from typing import Any

PERCENTILES = (50, 90, 99)


def quantile(bounds: Sequence[float], counts: Sequence[float], share: float) -> float | None:
    """The ``share`` quantile of counts per bucket, linear within a bucket; None without counts.

    ``counts`` has one entry more than ``bounds``; what lies above the last bound is said to be at it.

    >>> quantile((1.0, 2.0), (2, 2, 0), 0.75)
    1.5
    >>> quantile((1.0, 2.0), (0, 0, 4), 0.5), quantile((1.0,), (0, 0), 0.5)
    (2.0, None)
    """
    wanted, below = share * sum(counts), 0.0
    if not wanted:
        return None
    for bucket, count in enumerate(counts):
        if count and below + count >= wanted:
            if bucket == len(bounds):
                break
            low = bounds[bucket - 1] if bucket else 0.0
            return low + (bounds[bucket] - low) * (wanted - below) / count
        below += count
    return bounds[-1]


def traffic_figures(
    fleet: dict[str, Any], earlier: dict[str, Any] | None, elapsed_s: float
) -> dict[str, Any]:
    """This router's traffic. Rate and TTFT are of the ``elapsed_s`` since ``earlier``, which the same run of
    the router told, as is the share of spills; without it they are since start, and the rate is None."""
    traffic = fleet["traffic"]
    before = None if earlier is None else earlier["traffic"]
    counts = traffic["ttft"]["counts"]
    if before is not None:
        counts = [new - old for new, old in zip(counts, before["ttft"]["counts"], strict=True)]
    return {
        "requests": traffic["requests"],
        "requests_per_s": None if before is None else (traffic["requests"] - before["requests"]) / elapsed_s,
        "in_flight": traffic["in_flight"],
        "held": fleet["held"],
        "ttft_s": {
            f"p{percent}": quantile(traffic["ttft"]["bounds_s"], counts, percent / 100.0)
            for percent in PERCENTILES
        },
        "hit_share": _share(traffic["cached_tokens"], traffic["prompt_tokens"]),
        "spills": fleet["spills"],
        "spill_share": _share(
            fleet["spills"] - (0 if earlier is None else earlier["spills"]),
            sum(traffic["decisions"].values()) - (0 if before is None else sum(before["decisions"].values())),
        ),
        "decisions": traffic["decisions"],
        "saved_prefill_s": fleet["saved_prefill_s"],
        "retries": traffic["retries"],
        "broken_streams": traffic["broken_streams"],
        "errors": traffic["errors"],
    }


def replica_figures(replica: dict[str, Any]) -> dict[str, Any]:
    """One replica's row."""
    cache, index, calibration = replica["cache"], replica["index"], replica["calibration"]
    statuses: dict[str, int] = replica["traffic"]["statuses"]
    return {
        "replica": replica["name"],
        "health": _health(replica),
        "in_flight": replica["queued"] + replica["decoding"],
        "queued_ms": replica["wait_ms"],
        "held": replica["held"],
        "decoding": replica["decoding"],
        "prefill_factor": calibration["prefill_factor"],
        "decode_factor": calibration["decode_factor"],
        "index_tokens": index["tokens"],
        "capacity_tokens": index["capacity_tokens"],
        "cache_credit": cache["recent_ratio"],
        "cache_alert": cache["alert"],
        "hit_share": _share(cache["cached_tokens"], cache["prompt_tokens"]),
        "decisions": replica["traffic"]["decisions"],
        "errors": sum(count for status, count in statuses.items() if int(status) >= 500),
    }


def tenant_figures(
    tenant: dict[str, Any], earlier: dict[str, Any] | None, elapsed_s: float
) -> dict[str, Any]:
    """One tenant's row: what it uses at all routers, and how it fares at this one."""
    used = tenant["fleet"]

    def rate(key: str) -> float | None:
        return None if earlier is None else (used[key] - earlier["fleet"][key]) / elapsed_s

    return {
        "tenant": tenant["name"],
        "in_flight": used["in_flight"],
        "held": tenant["held"],
        "requests_per_s": rate("requests"),
        "tokens_per_s": rate("charged_tokens"),
        "hit_share": _share(tenant["cached_tokens"], tenant["prompt_tokens"]),
        "turned_away": tenant["turned_away"],
    }


def fleet_figures(
    fleet: dict[str, Any],
    earlier: dict[str, Any] | None = None,
    elapsed_s: float = 0.0,
    *,
    decisions: Sequence[dict[str, Any]] = (),
    prefixes: Sequence[dict[str, Any]] = (),
) -> dict[str, Any]:
    """Everything: ``traffic``, ``replicas``, ``tenants``, ``state`` (how routers share), and what
    ``/decisions`` and ``/prefixes`` told."""
    before = {} if earlier is None else {one["name"]: one for one in earlier["tenants"]}
    return {
        "traffic": traffic_figures(fleet, earlier, elapsed_s),
        "replicas": [replica_figures(replica) for replica in fleet["replicas"]],
        "tenants": [tenant_figures(one, before.get(one["name"]), elapsed_s) for one in fleet["tenants"]],
        "prefixes": list(prefixes),
        "decisions": list(decisions),
        "state": fleet["state"],
    }


def _health(replica: dict[str, Any]) -> str:
    if replica["leaving"]:
        return "leaving"
    return "draining" if replica["draining"] else str(replica["health"])


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole else None
