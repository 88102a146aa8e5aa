"""The keys under ``tracing:``: where traces go. Without the section there are none."""

from typing import Annotated

from pydantic import Field, field_validator

from router.config_values import Secret, Section


class TracingConfig(Section):
    """One OpenTelemetry span per routed request, sent in batches by a thread (needs the extra ``[otel]``)."""

    endpoint: str
    """OTLP over HTTP: ``http://COLLECTOR:4318/v1/traces``."""
    headers: dict[str, Secret] = Field(default_factory=dict)
    """Sent along, for collectors that want a key. A reload may change them, and nothing else of tracing."""
    sample: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of requests that begin a trace here. One that came with a ``traceparent`` is as that says."""
    service_name: Annotated[str, Field(min_length=1, max_length=100)] = "warmroute"

    @field_validator("endpoint")
    @classmethod
    def _http(cls, value: str) -> str:
        scheme, separator, rest = value.partition("://")
        if scheme not in ("http", "https") or not separator or not rest.partition("/")[2]:
            raise ValueError("expected http://HOST:PORT/v1/traces, with the path")
        if "@" in rest.partition("/")[0]:
            raise ValueError("expected no credentials in the URL; they belong in headers")
        return value

    def without_headers(self) -> "TracingConfig":
        """What a running router cannot change."""
        return self.model_copy(update={"headers": {}})
