"""Counters of hits and first tokens on a ``/metrics`` page of vLLM, SGLang, our replica or our router."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

_NAMES: Mapping[str, tuple[str, ...]] = {
    "queried_tokens": ("vllm:prefix_cache_queries", "sglang:prompt_tokens", "warmroute_prompt_tokens"),
    "hit_tokens": ("vllm:prefix_cache_hits", "sglang:cached_tokens", "warmroute_cached_tokens"),
    "ttft_s": (
        "vllm:time_to_first_token_seconds_sum",
        "sglang:time_to_first_token_seconds_sum",
        "warmroute_ttft_seconds_sum",
    ),
    "first_tokens": (
        "vllm:time_to_first_token_seconds_count",
        "sglang:time_to_first_token_seconds_count",
        "warmroute_ttft_seconds_count",
    ),
    "queue_s": ("vllm:request_queue_time_seconds_sum", "sglang:queue_time_seconds_sum"),
    "prefill_s": ("vllm:request_prefill_time_seconds_sum",),
    "output_tokens": ("vllm:generation_tokens", "sglang:generation_tokens", "warmroute_output_tokens"),
    "preemptions": ("vllm:num_preemptions", "sglang:num_retracted_requests"),
    "evicted_tokens": ("sglang:evicted_tokens",),
}
_FIELD_OF = {name: field for field, names in _NAMES.items() for name in names}


class MetricsError(ValueError):
    """A page that cannot be used; the message says which, why, and what was expected."""


@dataclass(frozen=True, slots=True)
class EngineCounters:
    """Sums since the processes began; ``None`` where a page does not tell."""

    queried_tokens: float | None = None
    """Prompt tokens looked up in the prefix cache."""
    hit_tokens: float | None = None
    ttft_s: float | None = None
    """Sum over ``first_tokens`` requests."""
    first_tokens: float | None = None
    queue_s: float | None = None
    prefill_s: float | None = None
    output_tokens: float | None = None
    preemptions: float | None = None
    evicted_tokens: float | None = None

    def since(self, before: "EngineCounters", what: str) -> "EngineCounters":
        """What was counted after ``before``. Raises ``MetricsError`` when a counter fell: a restart."""
        made: dict[str, float | None] = {}
        for field in fields(self):
            first, last = getattr(before, field.name), getattr(self, field.name)
            if first is not None and last is not None and last < first:
                raise MetricsError(
                    f"{what}: {field.name} fell from {first:g} to {last:g}: a replica restarted, or "
                    "the files are the wrong way round; take two pages of one run"
                )
            made[field.name] = None if first is None or last is None else last - first
        return EngineCounters(**made)

    @property
    def hit_share(self) -> float | None:
        """Of looked-up prompt tokens."""
        if not self.queried_tokens or self.hit_tokens is None:
            return None
        return self.hit_tokens / self.queried_tokens


def parse_counters(text: str, what: str) -> EngineCounters:
    """The counters on one page, or on the pages of several replicas one after the other (they add up).

    >>> page = "vllm:prefix_cache_queries_total 200\\nvllm:prefix_cache_hits_total 50\\n"
    >>> parse_counters(page * 2, "page").hit_share
    0.25

    Raises ``MetricsError``.
    """
    sums: dict[str, float] = {}
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                field = _FIELD_OF.get(sample.name.removesuffix("_total"))
                if field is not None:
                    sums[field] = sums.get(field, 0.0) + float(sample.value)
    except ValueError as error:
        raise MetricsError(f"{what}: no page of Prometheus metrics: {error}") from error
    if "queried_tokens" not in sums:
        raise MetricsError(
            f"{what}: no prefix cache counters; expected a /metrics page of vLLM, SGLang (--enable-metrics), "
            "our replica or our router"
        )
    return EngineCounters(**sums)


def read_counters(path: str | Path) -> EngineCounters:
    """The counters in a saved page. Raises ``MetricsError``."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MetricsError(f"{path}: cannot be read: {error}") from error
    return parse_counters(text, str(path))
