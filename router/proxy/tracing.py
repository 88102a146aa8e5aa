"""One OpenTelemetry span per routed request, with the decision as its attributes; off unless configured.

Spans are made and ended on the event loop; a thread encodes and sends them. The replica gets the span as its
parent (W3C ``traceparent``), and ``tracestate`` as it came.
"""

import asyncio
import threading
import time
from collections.abc import Mapping
from contextlib import suppress

from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
from opentelemetry.trace import Span, SpanKind, StatusCode
from opentelemetry.trace.propagation import set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from router.proxy.counters import Counters
from router.proxy.request_head import RequestHead
from router.proxy.span_export import CountingExporter
from router.proxy.trace_context import trace_context
from router.proxy.traced_request import TracedRequest
from router.tracing_config import TracingConfig

QUEUED_SPANS = 4_096
BATCH_SPANS = 64
"""Encoding them holds the interpreter's lock: small batches keep the event loop's waits short."""
BATCH_EVERY_MS = 500
STOP_LIMIT_S = 2.0
ROUTES = frozenset(
    f"/v1/{name}" for name in ("chat/completions", "completions", "responses", "embeddings", "messages")
)
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})


class Trace:
    """One request's span."""

    __slots__ = ("_span", "fields")

    def __init__(self, span: Span, fields: Mapping[str, str]) -> None:
        self._span = span
        self.fields = fields
        """Header fields for the replica: the span as its parent. They take the place of the client's."""

    @property
    def lines(self) -> bytes:
        """The same as header lines."""
        return "".join(f"{name}: {value}\r\n" for name, value in self.fields.items()).encode("latin-1")

    def ended(self, request: TracedRequest) -> None:
        """The request is over."""
        span = self._span
        if span.is_recording():
            span.set_attributes(request.attributes())
            if request.failed:
                span.set_status(StatusCode.ERROR, request.error_code or None)
        span.end()


class Tracing:
    """Owned by the router, which stops it."""

    def __init__(self, config: TracingConfig, counters: Counters, router: str) -> None:
        """``router``: this process among the others, as ``service.instance.id``."""
        resource = Resource.create({"service.name": config.service_name, "service.instance.id": router})
        self._provider = TracerProvider(
            sampler=ParentBasedTraceIdRatio(config.sample), resource=resource, shutdown_on_exit=False
        )
        self._exporter = CountingExporter(config, counters)
        self._provider.add_span_processor(
            BatchSpanProcessor(
                self._exporter,
                max_queue_size=QUEUED_SPANS,
                schedule_delay_millis=BATCH_EVERY_MS,
                max_export_batch_size=BATCH_SPANS,
            )
        )
        self._tracer = self._provider.get_tracer("warmroute")
        self._propagator = TraceContextTextMapPropagator()

    def apply(self, config: TracingConfig) -> None:
        """Of a reload: what may change (``TracingConfig.without_headers``)."""
        self._exporter.apply(config)

    def begin(self, head: RequestHead) -> Trace:
        """A request came in: its span, a child of the client's if there is one."""
        method = head.method.decode("ascii", "replace")
        path = head.path.decode("ascii", "replace")
        route = path if path in ROUTES else "/v1/*"
        known = method if method in METHODS else "_OTHER"
        span = self._tracer.start_span(
            f"{known} {route}",
            context=self._propagator.extract(trace_context(head.kept)),
            kind=SpanKind.SERVER,
            attributes={"http.request.method": known, "http.route": route, "url.path": path},
            start_time=time.time_ns(),
        )
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier, set_span_in_context(span))
        return Trace(span, carrier)

    async def stop(self) -> None:
        """Send what waits, as long as that is quick."""
        loop, sent = asyncio.get_running_loop(), asyncio.Event()

        def send() -> None:
            self._provider.shutdown()
            with suppress(RuntimeError):  # nobody waited so long: the loop is closed
                loop.call_soon_threadsafe(sent.set)

        threading.Thread(target=send, name="last spans", daemon=True).start()
        with suppress(TimeoutError):
            await asyncio.wait_for(sent.wait(), STOP_LIMIT_S)
