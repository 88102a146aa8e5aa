"""What ``/metrics`` tells of other replicas: sources that requests named, KV given away."""

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, Metric

from replica.peers.source_rule import SourceCounters
from replica.server.served_counters import ServedCounters

LABELS = ("model_name", "engine")


class PeerCollector:
    """Reads the counters when scraped."""

    def __init__(
        self, values: tuple[str, str], sources: SourceCounters | None, served: ServedCounters | None
    ) -> None:
        """``values``: of ``LABELS``."""
        self._values = values
        self._sources = sources
        self._served = served

    def collect(self) -> Iterable[Metric]:
        """One sample of each; nothing where there are no peers."""
        sources, served = self._sources, self._served
        if sources is not None:
            yield self._by_outcome(
                "warmroute:kv_sources",
                "Requests that named a source of their KV.",
                {"taken": sources.taken, "refused": sources.refused, "malformed": sources.malformed},
            )
        if served is not None:
            yield self._by_outcome(
                "warmroute:kv_peer_questions",
                "Questions of other replicas for KV.",
                {name: getattr(served, name) for name in ("whole", "partial", "busy", "refused", "broken")},
            )
            for name, text, value in (
                ("warmroute:kv_peer_served_blocks", "KV blocks given to other replicas.", served.blocks),
                ("warmroute:kv_peer_served_bytes", "Bytes of them.", served.size_bytes),
            ):
                family = CounterMetricFamily(name, text, labels=LABELS)
                family.add_metric(self._values, float(value))
                yield family

    def _by_outcome(self, name: str, text: str, counts: dict[str, int]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, "outcome"))
        for outcome, count in counts.items():
            family.add_metric((*self._values, outcome), float(count))
        return family
