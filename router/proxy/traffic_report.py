"""What a router's counters say of its traffic, for ``/fleet``: counts since start."""

from typing import Any

from router.proxy.counters import Counters


def traffic_state(counters: Counters) -> dict[str, Any]:
    """All of this router's requests. ``ttft.counts`` has one more entry than ``ttft.bounds_s``."""
    return {
        "requests": sum(counters.requests.values()),
        "in_flight": counters.in_flight,
        "decisions": _by_reason(counters.decisions),
        "errors": counters.errors,
        "retries": counters.retries,
        "broken_streams": counters.broken_streams,
        "client_disconnects": counters.client_disconnects,
        "prompt_tokens": counters.prompt_tokens,
        "cached_tokens": counters.cached_tokens,
        "output_tokens": counters.output_tokens,
        "ttft": {"bounds_s": counters.ttft_s.bounds, "counts": counters.ttft_s.counts},
    }


def replica_traffic(counters: Counters, name: str) -> dict[str, Any]:
    """Of the replica ``name``: requests by status sent to the client, decisions by reason."""
    return {
        "statuses": {str(status): count for (one, status), count in counters.requests.items() if one == name},
        "decisions": _by_reason({label: n for label, n in counters.decisions.items() if label[0] == name}),
    }


def _by_reason(counts: dict[tuple[str, str], int]) -> dict[str, int]:
    summed: dict[str, int] = {}
    for (_, reason), count in counts.items():
        summed[str(reason)] = summed.get(reason, 0) + count
    return summed
