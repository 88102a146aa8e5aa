"""From outcomes to the result object: the same figures for a simulation and for a replay.

All figures are over the *measured* requests: those sent after the warm-up, the first ``warmup_share`` of the
time in which requests are sent. A cache that is still empty says nothing about a router.

``ttft_in_slo_share``: of requests without error whose TTFT is at most ``slo ttft`` plus the unloaded cold
prefill of their prompt. ``in_slo_share``: of those that also decode within ``1 s + slo tpot * (output tokens
- 1)``: who reads a token per ``slo tpot``, a second behind, never waits.

Percentiles are values that occurred (nearest rank): p99 of 250 requests is the third largest.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from sim.outcome import Outcome

DECODE_BUFFER_S = 1.0
CLIENT_LIMIT = 0.7
"""Share of its own ceiling, one core, above which a load generator may be what is measured."""
CLUMPED_LIMIT = 0.1
"""Share of events above which times between tokens say more about a buffer than about replicas."""
LATE_LIMIT_S = 0.1
"""Or that sends so late (p99): it may be starved by what else runs on its machine."""


@dataclass(frozen=True, slots=True)
class Slo:
    """What counts as in time; the router's ``slo`` keys."""

    ttft_ms: float = 1000.0
    """Allowed on top of the prompt's own cold prefill."""
    tpot_ms: float = 50.0


@dataclass(frozen=True, slots=True)
class Spread:
    """A distribution in four numbers; ``None`` where there was nothing to measure."""

    mean: float | None
    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class Result:
    """How one policy did. ``json_object`` gives the names other programs rely on."""

    policy: str
    requests: int
    """Measured requests, those with errors included."""
    errors: int
    ttft_s: Spread
    e2e_s: Spread
    tpot_ms: Spread
    cached_share: float | None
    """Of prompt tokens of requests without error."""
    ideal_cached_share: float | None
    """What one infinite cache for the whole fleet would have had."""
    in_slo_share: float | None
    """First token and decoding in time."""
    ttft_in_slo_share: float | None
    """First token in time."""
    max_over_mean_work: float | None
    """Prompt tokens computed by the busiest replica over the fleet's mean."""
    spills: int | None
    """Sent past a warmer replica on purpose; ``None`` where the router does not tell."""
    wall_s: float
    """From the first request sent to the last answer, warm-up included, on the run's own clock: virtual in a
    simulation, real in a replay."""
    send_lag_p99_s: float | None = None
    """Replay only: how late requests were sent."""
    client_cpu_share: float | None = None
    """Replay only: processor time of the program that sent, of one core. Its own limit is 1."""
    client_ceiling_per_s: float | None = None
    """Replay only: requests a second that the program that sent could have sent at most, by its processor
    time for each of these."""
    tokens_per_event: float | None = None
    """Replay only: reply tokens that came in one event."""
    clumped_share: float | None = None
    """Replay only: events that came in one piece with the one before (see ``replay_client.clumped``)."""
    error_kinds: tuple[tuple[str, int], ...] = ()
    """The errors by text, most frequent first."""

    @property
    def client_limited(self) -> bool:
        """The program that sent was so busy, or sent so late, that its times may be its own."""
        return (self.client_cpu_share or 0.0) > CLIENT_LIMIT or (self.send_lag_p99_s or 0.0) > LATE_LIMIT_S

    def json_object(self) -> dict[str, Any]:
        """The result as INTERFACE names it; numbers rounded to what they can mean."""
        made: dict[str, Any] = {
            "policy": self.policy,
            "requests": self.requests,
            "errors": self.errors,
            "ttft_s": _rounded(asdict(self.ttft_s), 4),
            "e2e_s": _rounded(asdict(self.e2e_s), 4),
            "tpot_ms": _rounded(
                {name: value for name, value in asdict(self.tpot_ms).items() if name != "p90"}, 3
            ),
            "cached_share": _round(self.cached_share, 5),
            "ideal_cached_share": _round(self.ideal_cached_share, 5),
            "in_slo_share": _round(self.in_slo_share, 5),
            "ttft_in_slo_share": _round(self.ttft_in_slo_share, 5),
            "max_over_mean_work": _round(self.max_over_mean_work, 4),
            "spills": self.spills,
            "wall_s": round(self.wall_s, 3),
        }
        if self.send_lag_p99_s is not None:
            made["send_lag_p99_s"] = round(self.send_lag_p99_s, 4)
        if self.client_cpu_share is not None:
            made["client_cpu_share"] = round(self.client_cpu_share, 3)
            made["client_limited"] = self.client_limited
        if self.client_ceiling_per_s is not None:
            made["client_ceiling_per_s"] = round(self.client_ceiling_per_s, 1)
        if self.tokens_per_event is not None:
            made["tokens_per_event"] = round(self.tokens_per_event, 3)
        if self.clumped_share is not None:
            made["clumped_share"] = round(self.clumped_share, 4)
            made["clumped"] = self.clumped_share > CLUMPED_LIMIT
        if self.error_kinds:
            made["error_kinds"] = dict(self.error_kinds)
        return made


def warmup_end_s(outcomes: Sequence[Outcome], warmup_share: float) -> float:
    """When measuring begins: requests sent from then on count."""
    if not outcomes:
        return 0.0
    first = min(outcome.sent_s for outcome in outcomes)
    last = max(outcome.sent_s for outcome in outcomes)
    return first + warmup_share * (last - first)


def summarize(
    policy: str,
    outcomes: Sequence[Outcome],
    *,
    replicas: int | None,
    slo: Slo,
    cold_prefill_s: Callable[[int], float],
    warmup_share: float,
    ideal: float | None,
    reports_send_lag: bool = False,
) -> Result:
    """The result of a run. ``cold_prefill_s`` maps prompt tokens to an unloaded, uncached prefill.

    ``replicas`` is the size of the fleet, or ``None`` if it is not known which replica did what.
    """
    start_s = warmup_end_s(outcomes, warmup_share)
    measured = [outcome for outcome in outcomes if outcome.sent_s >= start_s]
    good = [outcome for outcome in measured if outcome.error is None]
    prompt_tokens = sum(outcome.prompt_tokens for outcome in good)
    cached = sum(outcome.cached_tokens for outcome in good)
    in_time = [outcome for outcome in good if _starts_in_slo(outcome, slo, cold_prefill_s)]
    in_slo = sum(_decodes_in_slo(outcome, slo) for outcome in in_time)
    kinds: dict[str, int] = {}
    for outcome in measured:
        if outcome.error is not None:
            kinds[outcome.error] = kinds.get(outcome.error, 0) + 1
    begin = min((outcome.sent_s for outcome in outcomes), default=0.0)
    lags = sorted(outcome.send_lag_s for outcome in measured) if reports_send_lag else []
    return Result(
        policy=policy,
        requests=len(measured),
        errors=len(measured) - len(good),
        ttft_s=_spread([outcome.ttft_s for outcome in good if outcome.ttft_s is not None]),
        e2e_s=_spread([outcome.e2e_s for outcome in good]),
        tpot_ms=_spread([1e3 * tpot for outcome in good if (tpot := outcome.tpot_s) is not None]),
        cached_share=cached / prompt_tokens if prompt_tokens else None,
        ideal_cached_share=ideal,
        in_slo_share=in_slo / len(measured) if measured else None,
        ttft_in_slo_share=len(in_time) / len(measured) if measured else None,
        max_over_mean_work=_max_over_mean_work(good, replicas),
        spills=None if replicas is None else sum(outcome.spilled for outcome in measured),
        wall_s=max((outcome.sent_s + outcome.e2e_s for outcome in outcomes), default=begin) - begin,
        send_lag_p99_s=at_share(lags, 0.99) if lags else None,
        error_kinds=tuple(sorted(kinds.items(), key=lambda kind: (-kind[1], kind[0]))),
    )


def _starts_in_slo(outcome: Outcome, slo: Slo, cold_prefill_s: Callable[[int], float]) -> bool:
    if outcome.ttft_s is None:
        return False
    return outcome.ttft_s <= slo.ttft_ms / 1e3 + cold_prefill_s(outcome.prompt_tokens)


def _decodes_in_slo(outcome: Outcome, slo: Slo) -> bool:
    if outcome.ttft_s is None:
        return False
    later_tokens = max(0, outcome.output_tokens - 1)
    return outcome.e2e_s - outcome.ttft_s <= DECODE_BUFFER_S + slo.tpot_ms / 1e3 * later_tokens


def _max_over_mean_work(outcomes: Sequence[Outcome], replicas: int | None) -> float | None:
    if replicas is None:
        return None
    work = [0] * replicas
    for outcome in outcomes:
        if outcome.replica is not None:
            work[outcome.replica] += outcome.prompt_tokens - outcome.cached_tokens
    return max(work) * replicas / sum(work) if sum(work) else None


def _spread(values: list[float]) -> Spread:
    if not values:
        return Spread(None, None, None, None)
    values.sort()
    return Spread(
        sum(values) / len(values), at_share(values, 0.5), at_share(values, 0.9), at_share(values, 0.99)
    )


def at_share(ordered: Sequence[float], share: float) -> float:
    """The value below which ``share`` of ``ordered`` lie; one that occurred (nearest rank)."""
    return ordered[min(len(ordered) - 1, int(len(ordered) * share))]


def _round(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def _rounded(values: dict[str, float | None], digits: int) -> dict[str, float | None]:
    return {name: _round(value, digits) for name, value in values.items()}
