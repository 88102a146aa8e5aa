"""How the sources of ``discovery:`` stand, for ``/metrics``."""

from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from router.discovery.discovery import SourceReport


def source_metrics(sources: Iterable[SourceReport]) -> Iterator[Metric]:
    """Metric families, labelled by source: as many as the config names."""
    up = GaugeMetricFamily(
        "warmroute_discovery_up",
        "0 while a source of replicas fails; what it found before stays. Alert on it.",
        labels=["source"],
    )
    found = GaugeMetricFamily(
        "warmroute_discovery_replicas", "Replicas that a source found last.", labels=["source"]
    )
    for one in sources:
        up.add_metric([one.source], float(one.failure is None))
        found.add_metric([one.source], one.replicas)
    yield up
    yield found
