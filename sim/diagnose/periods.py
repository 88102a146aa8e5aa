"""Two periods of one fleet: by how much the mean TTFT changed, split exactly into what can have done it."""

from dataclasses import dataclass

from sim.diagnose.metrics_page import EngineCounters

NO_CHANGE_SHARE = 0.1
"""Of the first period's TTFT: smaller changes get no verdict."""


@dataclass(frozen=True, slots=True)
class Period:
    """Means per request; ``None`` is "not told"."""

    requests: float
    prompt_tokens: float
    cached_share: float
    ttft_ms: float | None
    queue_ms: float | None = None
    """Waiting for the engine, part of ``ttft_ms``."""
    ideal_share: float | None = None
    """Of the period's own prompts, by replay."""
    preemptions: float | None = None

    @property
    def computed_tokens(self) -> float:
        """Prompt tokens that were not cached."""
        return self.prompt_tokens * (1.0 - self.cached_share)

    @property
    def us_per_token(self) -> float | None:
        """TTFT without the queue, per computed token."""
        if self.ttft_ms is None or not self.computed_tokens:
            return None
        return 1e3 * (self.ttft_ms - (self.queue_ms or 0.0)) / self.computed_tokens


def period_of(counters: EngineCounters) -> Period | None:
    """From what was counted in it; ``None`` when no request or no prompt was."""
    requests, share = counters.first_tokens, counters.hit_share
    if not requests or not counters.queried_tokens or share is None:
        return None

    def mean_ms(total_s: float | None) -> float | None:
        return None if total_s is None else 1e3 * total_s / requests

    return Period(
        requests=requests,
        prompt_tokens=counters.queried_tokens / requests,
        cached_share=share,
        ttft_ms=mean_ms(counters.ttft_s),
        queue_ms=mean_ms(counters.queue_s),
        preemptions=None if counters.preemptions is None else counters.preemptions / requests,
    )


@dataclass(frozen=True, slots=True)
class Change:
    """Milliseconds of mean TTFT, second period less first; ``parts`` add up to ``ttft_ms``."""

    ttft_ms: float
    parts: tuple[tuple[str, float], ...]
    verdict: str
    missing: tuple[str, ...]
    """Evidence that would say more."""


LONGER, FEWER_HITS, SLOWER, QUEUE = "prompts of another length", "other hits", "prefill speed", "queue"


def change(first: Period, second: Period) -> Change | None:
    """``None`` when a period tells no TTFT.

    With ``c`` computed tokens per request at ``r`` microseconds each and ``q`` milliseconds of queue, TTFT is
    ``q + c r``. ``c`` changes with the length of prompts and with hits:

    >>> a = Period(100, 1000, 0.75, ttft_ms=30.0, queue_ms=5.0)       # 250 tokens at 100 us
    >>> b = Period(100, 1000, 0.30, ttft_ms=75.0, queue_ms=5.0)       # 700 tokens at 100 us
    >>> made = change(a, b)
    >>> [(name, round(ms, 3)) for name, ms in made.parts]
    [('prompts of another length', 0.0), ('other hits', 45.0), ('prefill speed', 0.0), ('queue', 0.0)]
    >>> made.verdict.split(":")[0]
    'fewer hits'
    """
    rate, later_rate = first.us_per_token, second.us_per_token
    if first.ttft_ms is None or second.ttft_ms is None or rate is None or later_rate is None:
        return None
    longer = (second.prompt_tokens - first.prompt_tokens) * (1.0 - first.cached_share) * rate / 1e3
    hits = second.prompt_tokens * (first.cached_share - second.cached_share) * rate / 1e3
    slower = second.computed_tokens * (later_rate - rate) / 1e3
    queue = (second.queue_ms or 0.0) - (first.queue_ms or 0.0)
    parts = ((LONGER, longer), (FEWER_HITS, hits), (SLOWER, slower), (QUEUE, queue))
    total = second.ttft_ms - first.ttft_ms
    return Change(total, parts, _verdict(first, second, total, dict(parts)), tuple(_missing(first, second)))


def _verdict(first: Period, second: Period, total: float, parts: dict[str, float]) -> str:
    if abs(total) < NO_CHANGE_SHARE * (first.ttft_ms or 0.0):
        return "no regression: the mean TTFT changed by less than 10%"
    worst = max(parts, key=lambda name: parts[name] if total > 0 else -parts[name])
    share = f"{parts[worst]:+,.1f} of {total:+,.1f} ms"
    if worst == FEWER_HITS:
        moved = f"{first.cached_share:.1%} to {second.cached_share:.1%} cached"
        name = "fewer hits" if total > 0 else "more hits"
        return f"{name}: {moved}, {share}{_whose_hits(first, second)}"
    if worst == LONGER:
        name = "longer prompts" if total > 0 else "shorter prompts"
        return f"{name}: {first.prompt_tokens:,.0f} to {second.prompt_tokens:,.0f} tokens, {share}"
    if worst == QUEUE:
        name = "a longer queue" if total > 0 else "a shorter queue"
        return f"{name}: {first.queue_ms or 0:,.1f} to {second.queue_ms or 0:,.1f} ms, {share}"
    name = "slower prefill" if total > 0 else "faster prefill"
    return f"{name}: {first.us_per_token:,.1f} to {second.us_per_token:,.1f} µs a computed token, {share}"


def _whose_hits(first: Period, second: Period) -> str:
    if first.ideal_share is None or second.ideal_share is None:
        return ""
    by_prompts = second.ideal_share - first.ideal_share
    by_fleet = (second.cached_share - second.ideal_share) - (first.cached_share - first.ideal_share)
    whose = "the prompts" if abs(by_prompts) >= abs(by_fleet) else "caches and routing"
    return (
        f"; it is {whose}: an infinite cache would have had {first.ideal_share:.1%} of the first period's "
        f"prompts and {second.ideal_share:.1%} of the second's"
    )


def _missing(first: Period, second: Period) -> list[str]:
    missing = []
    if first.queue_ms is None or second.queue_ms is None:
        missing.append("time in the queue (vLLM and SGLang count it): waiting looks like slow prefill")
    if first.ideal_share is None or second.ideal_share is None:
        missing.append("the prompts of both periods (FILE and --before): were they changed, or the caches?")
    if first.preemptions is None or second.preemptions is None:
        missing.append("preemptions")
    return missing
