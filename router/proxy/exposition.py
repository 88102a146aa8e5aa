"""``/metrics`` in Prometheus' text form, made from the counters and the fleet when asked."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from router.discovery.discovery import SourceReport
from router.proxy.cache_report import cache_metrics
from router.proxy.counters import Counters, Histogram
from router.proxy.explanation import cost_fit
from router.proxy.source_report import source_metrics
from router.proxy.state_report import state_metrics
from router.proxy.tenant_report import tenant_metrics
from router.routing.fleet import Fleet
from router.routing.health import HealthState
from router.state.shared_state import StateReport


class RouterCollector(Collector):
    """Reads the router's state at scrape time. Labels are replica names, reasons and codes: bounded."""

    def __init__(
        self, fleet: Fleet, counters: Counters, state: StateReport, sources: list[SourceReport]
    ) -> None:
        self._fleet = fleet
        self._state = state
        self._sources = sources
        self._counters = counters

    def collect(self) -> Iterator[Metric]:
        """Every metric family."""
        yield from self._traffic()
        yield from self._replicas()
        yield from cache_metrics(self._fleet, self._counters)
        yield from tenant_metrics(self._fleet, self._counters)
        yield from state_metrics(self._state)
        yield from source_metrics(self._sources)

    def _traffic(self) -> Iterator[Metric]:
        counters, fleet = self._counters, self._fleet
        requests = CounterMetricFamily(
            "warmroute_requests",
            "Requests answered, by replica and status sent to the client (499: the client left).",
            labels=["replica", "status"],
        )
        for (replica, status), count in counters.requests.items():
            requests.add_metric([replica, str(status)], count)
        yield requests
        decisions = CounterMetricFamily(
            "warmroute_decisions", "Routing decisions by replica and reason.", labels=["replica", "reason"]
        )
        for (replica, reason), count in counters.decisions.items():
            decisions.add_metric([replica, reason], count)
        yield decisions
        errors = CounterMetricFamily("warmroute_errors", "Errors made by the router.", labels=["code"])
        for code, count in counters.errors.items():
            errors.add_metric([code], count)
        yield errors
        for name, text, value in (
            ("retries", "Requests sent again to another replica.", counters.retries),
            ("handoffs", "Prompts that a prefill replica computed for another.", counters.handoffs),
            ("failed_handoffs", "Prompts that no prefill replica computed.", counters.failed_handoffs),
            ("kv_sources_named", "Requests that were told where to pull KV.", counters.kv_sources_named),
            (
                "client_disconnects",
                "Clients that left before their answer was complete.",
                counters.client_disconnects,
            ),
            ("broken_streams", "Answers that broke after their first byte.", counters.broken_streams),
            (
                "tokenless_streams",
                "Whole answers to requests for a stream that had no token: they are not in ttft_seconds.",
                counters.tokenless_streams,
            ),
            ("prompt_tokens", "Prompt tokens that replicas reported.", counters.prompt_tokens),
            ("cached_tokens", "Of those, tokens served from a prefix cache.", counters.cached_tokens),
            ("output_tokens", "Reply tokens that replicas reported.", counters.output_tokens),
            ("request_log_dropped", "Rows of the request log not written.", counters.request_log_dropped),
            ("trace_spans_sent", "Spans that the collector took.", counters.spans_sent),
            ("trace_spans_lost", "Spans that the collector did not take.", counters.spans_lost),
            ("config_reloads", "Configs applied after the first.", counters.reloads),
            ("config_reload_failures", "Configs that were refused on reload.", counters.failed_reloads),
            ("spills", "Requests that left a warmer replica because waiting there cost more.", fleet.spills),
            ("saved_prefill_seconds", "Prefill seconds that hits were predicted to save.", fleet.saved_s),
        ):
            yield CounterMetricFamily(f"warmroute_{name}", text, value=value)
        yield GaugeMetricFamily("warmroute_in_flight", "Requests being served.", value=counters.in_flight)
        yield GaugeMetricFamily(
            "warmroute_client_connections", "Open client connections.", value=counters.open_client_connections
        )
        yield GaugeMetricFamily(
            "warmroute_receiving_bytes",
            "Bytes of requests' bodies that are not whole yet, all clients together.",
            value=counters.receiving_bytes,
        )
        yield GaugeMetricFamily(
            "warmroute_replica_connections",
            "Open connections to replicas.",
            value=counters.open_replica_connections,
        )
        yield _histogram(
            "warmroute_ttft_seconds", "Time to the first token of streamed answers.", counters.ttft_s
        )
        yield _histogram(
            "warmroute_first_byte_seconds", "Time to the first byte of answers.", counters.first_byte_s
        )
        yield _histogram(
            "warmroute_decision_seconds", "Time to read a prompt and choose a replica.", counters.decision_s
        )

    def _replicas(self) -> Iterator[Metric]:
        fleet = self._fleet
        gauges = {
            name: GaugeMetricFamily(f"warmroute_replica_{name}", text, labels=["replica"])
            for name, text in (
                ("up", "1 while the replica may take new work."),
                ("ejected", "1 while the replica is ejected."),
                (
                    "silent",
                    "1 while it has been ejected for producing nothing and has produced nothing since.",
                ),
                ("held", "Requests that wait in the router for this replica."),
                ("queued", "Requests sent that have shown no first token."),
                ("decoding", "Requests past their first token."),
                ("wait_seconds", "Predicted prefill of requests without a first token."),
                ("outstanding_tokens", "Uncached prompt and expected reply tokens in flight."),
                ("index_tokens", "Tokens the index believes the replica holds."),
                ("index_capacity_tokens", "Tokens it may believe so."),
                ("prefill_factor", "Learned prefill time over the prior's."),
                ("decode_factor", "Learned decode step over the prior's."),
                ("prefill_error", "How far off predicted prefills were lately, as a share of them."),
                ("step_error", "How far off predicted decode steps were lately."),
            )
        }
        yield GaugeMetricFamily(
            "warmroute_usable_replicas",
            "Replicas that may take new work; 0 also where there are none. Alert on it.",
            value=sum(replica.usable for replica in fleet.replicas.staying),
        )
        ratio = fleet.token_ratio.tokens_per_unit
        for replica in fleet.replicas.staying:
            for name, value in (
                ("up", float(replica.usable)),
                ("ejected", float(replica.health.state is HealthState.EJECTED)),
                ("silent", float(replica.health.silent_at is not None)),
                ("held", replica.held.own),
                ("queued", replica.ledger.queued),
                ("decoding", replica.ledger.decoding),
                ("wait_seconds", replica.ledger.queued_prefill_s),
                ("outstanding_tokens", replica.ledger.outstanding_tokens),
                ("index_tokens", fleet.index.held(replica.index) * ratio),
                ("index_capacity_tokens", fleet.index.capacity(replica.index) * ratio),
                ("prefill_factor", replica.cost.prefill_factor),
                ("decode_factor", replica.cost.decode_factor),
            ):
                gauges[name].add_metric([replica.name], value)
            fit = cost_fit(replica.cost)
            for name in ("prefill_error", "step_error"):
                if fit[name] is not None:
                    gauges[name].add_metric([replica.name], fit[name])
        yield from gauges.values()


def _histogram(name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
    buckets, below = [], 0
    for bound, count in zip((*map(str, histogram.bounds), "+Inf"), histogram.counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=histogram.total)


def metrics_page(fleet: Fleet, counters: Counters, state: StateReport, sources: list[SourceReport]) -> bytes:
    """The page's bytes."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(RouterCollector(fleet, counters, state, sources))
    return generate_latest(registry)
