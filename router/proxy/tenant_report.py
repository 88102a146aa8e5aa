"""What ``/fleet`` and ``/metrics`` tell of tenants: what they may use and used, here and at all routers.

Only on the admin port: tenants see none of it.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily

from router.proxy.counters import Counters, TenantCounters
from router.routing.fleet import Fleet
from router.routing.quota import Quota

MOST_LABELS = 200
"""So many tenants have rows of their own in ``/metrics``, in the config's order; the others share one."""
OTHERS = "(others)"


def tenant_states(fleet: Fleet, counters: Counters) -> list[dict[str, Any]]:
    """``/fleet``'s ``tenants``, in the config's order; counts are since start.

    ``fleet`` in each is what all routers let in that this one has heard of.
    """
    return [
        _state(fleet, name, quota, counters.tenants[name]) for name, quota in fleet.tenants.quotas.items()
    ]


def _state(fleet: Fleet, name: str, quota: Quota, counted: TenantCounters) -> dict[str, Any]:
    tenant, limits = fleet.tenants.tenant(name), quota.limits
    return {
        "name": name,
        "namespace": tenant.namespace,
        "weight": tenant.weight,
        "limits": {
            "requests_per_s": limits.requests_per_s,
            "tokens_per_s": limits.tokens_per_s,
            "concurrent": limits.concurrent,
            "share": quota.share,
        },
        "in_flight": quota.in_flight,
        "held": quota.held,
        "requests": quota.requests,
        "charged_tokens": quota.tokens,
        "statuses": {str(status): count for status, count in counted.statuses.items()},
        "turned_away": counted.turned_away,
        "prompt_tokens": counted.prompt_tokens,
        "cached_tokens": counted.cached_tokens,
        "output_tokens": counted.output_tokens,
        "ttft_mean_ms": 1e3 * counted.ttft_total_s / counted.ttft_count if counted.ttft_count else None,
        "fleet": {
            "in_flight": quota.in_flight + quota.peers_in_flight,
            "requests": quota.requests + quota.peers_requests,
            "charged_tokens": quota.tokens + quota.peers_tokens,
        },
    }


def tenant_metrics(fleet: Fleet, counters: Counters) -> Iterator[Metric]:
    """Where no tenants are configured, only that their file was not refused."""
    yield CounterMetricFamily(
        "warmroute_tenant_file_failures",
        "Changes of the tenants' file that were refused.",
        value=counters.failed_tenant_files,
    )
    quotas = fleet.tenants.quotas
    if not quotas:
        return
    labels = {name: name if number < MOST_LABELS else OTHERS for number, name in enumerate(quotas)}
    requests = _Sums("requests", "A tenant's requests by status sent to the client.", "status")
    turned = _Sums(
        "turned_away", "Of them, those that got an error of the router's own, by its code.", "code"
    )
    tokens = _Sums("tokens", "Tokens that replicas reported: prompt, cached (of these), output.", "kind")
    flight: dict[str, float] = {}
    held: dict[str, float] = {}
    ttft: dict[str, tuple[int, float]] = {}
    for name, label in labels.items():
        quota, counted = quotas[name], counters.tenants[name]
        for status, count in counted.statuses.items():
            requests.add(label, str(status), count)
        for code, count in counted.turned_away.items():
            turned.add(label, code, count)
        tokens.add(label, "prompt", counted.prompt_tokens)
        tokens.add(label, "cached", counted.cached_tokens)
        tokens.add(label, "output", counted.output_tokens)
        flight[label] = flight.get(label, 0) + quota.in_flight
        held[label] = held.get(label, 0) + quota.held
        count, total_s = ttft.get(label, (0, 0.0))
        ttft[label] = count + counted.ttft_count, total_s + counted.ttft_total_s
    yield from (requests.family(), turned.family(), tokens.family())
    for kind, text, values in (
        ("in_flight", "A tenant's requests that are held or being served by this router.", flight),
        ("held", "Of them, those that wait in this router.", held),
    ):
        gauge = GaugeMetricFamily(f"warmroute_tenant_{kind}", text, labels=["tenant"])
        for label, value in values.items():
            gauge.add_metric([label], value)
        yield gauge
    summary = SummaryMetricFamily(
        "warmroute_tenant_ttft_seconds", "Time to the first token of a tenant's streams.", labels=["tenant"]
    )
    for label, (count, total_s) in ttft.items():
        summary.add_metric([label], count, total_s)
    yield summary


class _Sums:
    """One counter by tenant and one more label."""

    def __init__(self, name: str, text: str, by: str) -> None:
        self._name, self._text, self._by = name, text, by
        self._sums: dict[tuple[str, str], int] = {}

    def add(self, label: str, value: str, count: int) -> None:
        self._sums[label, value] = self._sums.get((label, value), 0) + count

    def family(self) -> CounterMetricFamily:
        family = CounterMetricFamily(
            f"warmroute_tenant_{self._name}", self._text, labels=["tenant", self._by]
        )
        for (label, value), count in self._sums.items():
            family.add_metric([label, value], count)
        return family
