"""How the shared state stands, for ``/metrics`` and ``/fleet``."""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from router.state.link_status import LinkState
from router.state.shared_state import StateReport

_COUNTERS = {
    "changes": "How often the shared state began or ceased to work.",
    "batches_sent": "Batches of news told to other routers, signs of life included.",
    "bytes_sent": "Bytes of them.",
    "batches_received": "Batches of news that other routers told.",
    "events_received": "Events in them.",
    "gaps": "How often batches of another router were missing; it was asked for a statement each time.",
    "late_batches": "Batches that came after a later one and were not used.",
    "dropped_events": "Own events that could not be told in time; what still mattered was stated later.",
    "unknown_replicas": "Events about replicas that this router's config does not name.",
    "malformed": "Messages that are no batch, or of another version.",
}


def state_fields(report: StateReport) -> dict[str, Any]:
    """The part ``state`` of ``/fleet``."""
    return asdict(report)


def state_metrics(report: StateReport) -> Iterator[Metric]:
    """Metric families; with ``kind: memory`` and no snapshot there is nothing to tell."""
    if report.snapshot_written is not None:
        yield GaugeMetricFamily(
            "warmroute_snapshot_written",
            "1 if the snapshot file could be written when it last should have been.",
            value=float(report.snapshot_written),
        )
    if report.kind == "memory":
        return
    state = GaugeMetricFamily(
        "warmroute_state",
        "1 for the state of sharing with other routers; alert on anything but sharing.",
        labels=["state"],
    )
    for one in LinkState:
        state.add_metric([one.value], float(one.value == report.state))
    yield state
    yield GaugeMetricFamily(
        "warmroute_state_peers", "Other routers heard within the lease.", value=len(report.peers)
    )
    yield GaugeMetricFamily(
        "warmroute_state_peers_outstanding",
        "Requests that other routers hold or have in flight.",
        value=sum(peer.outstanding for peer in report.peers),
    )
    lag = GaugeMetricFamily(
        "warmroute_state_lag_seconds", "From sending news until every router can have it, as last measured."
    )
    if report.lag_ms is not None:
        lag.add_metric([], report.lag_ms / 1_000.0)
    yield lag
    for name, text in _COUNTERS.items():
        yield CounterMetricFamily(f"warmroute_state_{name}", text, value=getattr(report, name))
