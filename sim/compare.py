"""Policies against one another over loads and seeds: every policy gets the same arrivals at the same seed."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sim.estimates import Estimate, estimate, paired_difference, paired_ratio
from sim.results import Result
from sim.simulate import Progress, SimulationSettings, simulate
from sim.workload.trace import Trace

TraceOfSeed = Callable[[int], Trace]


@dataclass(frozen=True, slots=True)
class Measure:
    """One figure of a result that is compared."""

    name: str
    label: str
    value: Callable[[Result], float | None]
    digits: int
    less_is_better: bool
    as_ratio: bool = True
    """Compared as a ratio; else as a difference."""


MEASURES = (
    Measure("ttft_s", "TTFT s", lambda result: result.ttft_s.mean, 2, True),
    Measure("ttft_p99_s", "TTFT p99 s", lambda result: result.ttft_s.p99, 1, True),
    Measure("e2e_s", "E2E s", lambda result: result.e2e_s.mean, 2, True),
    Measure("tpot_ms", "TPOT ms", lambda result: result.tpot_ms.mean, 1, True),
    Measure("in_slo_share", "in SLO", lambda result: result.in_slo_share, 3, False, as_ratio=False),
    Measure(
        "ttft_in_slo_share", "TTFT in SLO", lambda result: result.ttft_in_slo_share, 3, False, as_ratio=False
    ),
    Measure("cached_share", "cached share", lambda result: result.cached_share, 3, False, as_ratio=False),
)


@dataclass(frozen=True, slots=True)
class Cell:
    """One policy at one rate: the results of all seeds, in order."""

    policy: str
    rate: float
    load: float
    """Requests (timed traces) or new sessions a second."""
    results: tuple[Result, ...]

    def values(self, measure: Measure) -> list[float] | None:
        """The measure, seed by seed; ``None`` if some run has none."""
        values = [measure.value(result) for result in self.results]
        return None if None in values else [value for value in values if value is not None]

    def estimate(self, measure: Measure) -> Estimate | None:
        """Its mean over seeds."""
        values = self.values(measure)
        return None if values is None else estimate(values)


@dataclass(frozen=True, slots=True)
class Comparison:
    """Cells by rate, then policy; the first policy is the reference."""

    seeds: tuple[int, ...]
    cells: tuple[Cell, ...]

    def reference(self, cell: Cell) -> Cell:
        """The first policy at the cell's rate."""
        return next(other for other in self.cells if other.rate == cell.rate)

    def against_reference(self, cell: Cell, measure: Measure) -> Estimate | None:
        """How much larger the cell's measure is than the reference's, seed by seed."""
        values, base = cell.values(measure), self.reference(cell).values(measure)
        if values is None or base is None:
            return None
        return paired_ratio(values, base) if measure.as_ratio else paired_difference(values, base)

    def json_object(self) -> dict[str, Any]:
        """Everything, for programs."""
        return {
            "seeds": list(self.seeds),
            "reference": self.cells[0].policy,
            "cells": [self._json_cell(cell) for cell in self.cells],
        }

    def _json_cell(self, cell: Cell) -> dict[str, Any]:
        made: dict[str, Any] = {"policy": cell.policy, "rate": cell.rate, "load": round(cell.load, 4)}
        made["measures"] = {
            measure.name: {
                "mean": _json_estimate(cell.estimate(measure)),
                "against_reference": _json_estimate(self.against_reference(cell, measure)),
            }
            for measure in MEASURES
        }
        made["errors"] = sum(result.errors for result in cell.results)
        made["results"] = [result.json_object() for result in cell.results]
        return made


def compare(
    trace_of_seed: TraceOfSeed,
    policies: Sequence[str],
    *,
    seeds: int,
    rates: Sequence[float] = (1.0,),
    first_seed: int = 1,
    replicas: int = 8,
    settings: SimulationSettings | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Run every policy at every rate with ``seeds`` seeds from ``first_seed`` on.

    Raises ValueError for arguments that make no sense.
    """
    if seeds < 1:
        raise ValueError(f"seeds is {seeds}; expected 1 or more (2 for confidence intervals)")
    if not rates or len(set(rates)) != len(rates):
        raise ValueError(f"rates are {list(rates)}; expected one or more, each once")
    if len(set(policies)) != len(policies):
        raise ValueError(f"policies are {', '.join(policies)}; expected each once")
    numbers = tuple(range(first_seed, first_seed + seeds))
    traces = [trace_of_seed(seed) for seed in numbers]
    done: dict[tuple[float, str], list[Result]] = {}
    for rate in rates:
        for seed, trace in zip(numbers, traces, strict=True):
            told = None if progress is None else _named(progress, f"rate {rate:g}, seed {seed}")
            results = simulate(
                trace, policies, replicas=replicas, rate=rate, seed=seed, settings=settings, progress=told
            )
            for policy, result in zip(policies, results, strict=True):
                done.setdefault((rate, policy), []).append(result)
    return Comparison(
        numbers,
        tuple(
            Cell(policy, rate, offered_load(traces[0], rate), tuple(done[rate, policy]))
            for rate in rates
            for policy in policies
        ),
    )


def offered_load(trace: Trace, rate: float) -> float:
    """Requests a second that a timed trace brings at ``rate``; of sessions, new ones a second."""
    if trace.in_sessions:
        return rate
    times = [request.timestamp_ms or 0.0 for request in trace.requests]
    span_s = (max(times) - min(times)) / 1e3
    return len(times) / span_s * rate if span_s else float(len(times))


def _named(progress: Progress, where: str) -> Progress:
    return lambda policy, done, total: progress(f"{policy}, {where}", done, total)


def _json_estimate(made: Estimate | None) -> dict[str, float | None] | None:
    if made is None:
        return None
    return {
        "value": round(made.mean, 5),
        "half_width": None if made.half_width is None else round(made.half_width, 5),
    }
