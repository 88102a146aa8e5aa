"""Sends spans to a collector, in a thread, and counts them; what fails is one log line, not one per batch."""

import logging
from collections.abc import Sequence

from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from router.proxy.counters import Counters
from router.tracing_config import TracingConfig

log = logging.getLogger("warmroute.tracing")

EXPORT_LIMIT_S = 5.0


class CountingExporter(SpanExporter):
    """OTLP over HTTP. ``export`` runs in the batch processor's thread, one call at a time."""

    def __init__(self, config: TracingConfig, counters: Counters) -> None:
        logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)  # a line per batch; ours is enough
        self._config = config
        self._otlp = _otlp(config)
        self._endpoint = config.endpoint
        self._counters = counters
        self._failing = False

    def apply(self, config: TracingConfig) -> None:
        """Use its headers from the next batch on. Called on the event loop."""
        if config != self._config:
            self._config, self._otlp = config, _otlp(config)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Send ``spans``; those of a batch that cannot be sent are lost, and counted."""
        result = self._otlp.export(spans)
        failed = result is not SpanExportResult.SUCCESS
        if failed:
            self._counters.spans_lost += len(spans)
        else:
            self._counters.spans_sent += len(spans)
        if failed and not self._failing:
            log.warning("traces cannot be sent to %s; requests go on, spans are lost", self._endpoint)
        elif self._failing and not failed:
            log.info("traces are sent to %s again", self._endpoint)
        self._failing = failed
        return result

    def shutdown(self) -> None:
        """Wait for nobody."""
        self._otlp.shutdown()


def _otlp(config: TracingConfig) -> SpanExporter:
    headers = {name: value.get_secret_value() for name, value in config.headers.items()}
    return OTLPSpanExporter(config.endpoint, headers=headers, timeout=EXPORT_LIMIT_S)
