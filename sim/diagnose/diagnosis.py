"""Why is the hit rate what it is: all figures of one sample, before anybody writes them down."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from sim.diagnose.account import Account, Cause
from sim.diagnose.divergence import AppDivergence, divergence
from sim.diagnose.engine_evidence import EngineEvidence, engine_evidence
from sim.diagnose.prompt_levels import PromptLevels, prompt_levels
from sim.diagnose.replays import Replays, replays
from sim.diagnose.sample import Sample
from sim.simulate import Progress
from sim.simulation_settings import SimulationSettings
from sim.step_time.step_time import cold_prefill_s

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Tokens are those of the counted requests."""

    sample: Sample
    replicas: int
    policies: tuple[str, ...]
    """The first one stands for the fleet where the log does not tell where requests went."""
    capacity_tokens: int
    """Of all replicas together."""
    replica_tokens: int
    """Of one."""
    assumed: str
    """Why that is not known, and what tells it; empty if it is."""
    order: tuple[int, ...]
    """Numbers of the requests in order of arrival."""
    counted: tuple[bool, ...]
    """By number of the request; the others only warm the caches."""
    account: Account
    ideal_tokens: int
    pooled_tokens: int
    simulated_tokens: dict[str, int]
    as_routed_tokens: int | None
    measured_tokens: int | None
    levels: PromptLevels
    apps: tuple[AppDivergence, ...]
    distances: tuple[int, ...]
    """Of every block that an infinite cache would have had, in rising order, in tokens."""
    engine: EngineEvidence | None
    prefill_s_per_token: float
    """Of a cold prompt of mean length, beyond what a step takes that computes next to nothing."""
    requests_per_day: float | None
    """``None`` where the sample has no times."""

    @property
    def requests(self) -> int:
        """That count."""
        return sum(self.counted)

    @property
    def gap_tokens(self) -> int:
        """Between an infinite cache that sees every request and what is."""
        return self.ideal_tokens - self.account.cached_tokens


def diagnose(
    sample: Sample,
    policies: Sequence[str],
    *,
    replicas: int,
    rate: float,
    seed: int,
    settings: SimulationSettings,
    warmup_share: float,
    measured_share: float | None = None,
    assumed: str = "",
    progress: Progress | None = None,
) -> Diagnosis:
    """All figures of ``sample``. Raises ValueError for an unknown policy.

    Requests in the first ``warmup_share`` of the time, and in a log with ``cached_tokens`` those that do not
    tell them, warm the caches and are not counted. ``measured_share`` is what engines counted themselves, for
    logs that do not tell. ``assumed``: as in ``Diagnosis``.
    """
    trace = sample.trace
    replayed = replays(
        sample, policies, replicas=replicas, rate=rate, seed=seed, settings=settings, progress=progress
    )
    measured = [sample.measured_tokens(number) for number in range(len(trace.requests))]
    counted = _counted(replayed, measured, warmup_share)
    levels = prompt_levels(sample, replayed.order, replayed.ideal, counted, progress)

    def total(values: Sequence[int | None]) -> int:
        return sum(value or 0 for value, counts in zip(values, counted, strict=True) if counts)

    simulated = {policy: total(cached) for policy, cached in replayed.simulated.items()}
    as_routed = replayed.as_routed
    expected = replayed.simulated[policies[0]] if as_routed is None else as_routed
    down = [
        *levels.levels,
        (Cause.CAPACITY, total(replayed.pooled)),
        (Cause.ROUTING, total(expected)),
    ]
    prompt_tokens = total([request.prompt_tokens for request in trace.requests])
    measured_tokens = None
    if any(value is not None for value in measured):
        measured_tokens = total(measured)
    elif measured_share is not None:
        measured_tokens = round(measured_share * prompt_tokens)
    if measured_tokens is not None:
        down.append((Cause.ENGINE, measured_tokens))
    requests = sum(counted)
    mean_tokens = max(1, prompt_tokens // max(1, requests))
    cold_s, least_s = (
        cold_prefill_s(settings.step_time, tokens, settings.replica.max_batched_tokens)
        for tokens in (mean_tokens, 1)
    )
    return Diagnosis(
        sample=sample,
        replicas=replicas,
        policies=tuple(policies),
        capacity_tokens=sum(settings.replica_settings(k).capacity_tokens for k in range(replicas)),
        replica_tokens=settings.replica.capacity_tokens,
        assumed=assumed,
        order=replayed.order,
        counted=counted,
        account=Account.of_levels(prompt_tokens, down),
        ideal_tokens=total(replayed.ideal),
        pooled_tokens=total(replayed.pooled),
        simulated_tokens=simulated,
        as_routed_tokens=None if as_routed is None else total(as_routed),
        measured_tokens=measured_tokens,
        levels=levels,
        apps=tuple(divergence(sample, replayed.order, levels, counted)),
        distances=tuple(
            distance * trace.block_tokens
            for distance in sorted(
                chain.from_iterable(
                    row for row, counts in zip(replayed.distances, counted, strict=True) if counts
                )
            )
        ),
        engine=engine_evidence(sample, expected, counted),
        prefill_s_per_token=(cold_s - least_s) / max(1, mean_tokens - 1),
        requests_per_day=_per_day(replayed, counted) if sample.timed else None,
    )


def _counted(replayed: Replays, measured: Sequence[int | None], warmup_share: float) -> tuple[bool, ...]:
    first, last = min(replayed.sent_s), max(replayed.sent_s)
    start_s = first + warmup_share * (last - first)
    told = any(value is not None for value in measured)
    return tuple(
        sent_s >= start_s and (value is not None or not told)
        for sent_s, value in zip(replayed.sent_s, measured, strict=True)
    )


def _per_day(replayed: Replays, counted: Sequence[bool]) -> float | None:
    times = [sent_s for sent_s, counts in zip(replayed.sent_s, counted, strict=True) if counts]
    span_s = max(times) - min(times) if times else 0.0
    return (len(times) - 1) / span_s * DAY_S if span_s > 0 else None
