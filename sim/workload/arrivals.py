"""When each request of a trace is sent: at a time, or some thinking after the answer before it."""

import random
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from sim.workload.trace import Trace, TraceRequest

DEFAULT_STEP_MS = 3000.0


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request and what sets it off: ``at_s``, or the end of another plus ``think_s``."""

    request: TraceRequest
    at_s: float | None
    """Seconds after the start; ``None`` for a turn that follows another."""
    next_turn: int | None = None
    """Position in the plan of the turn that follows this one's answer."""
    think_s: float = 0.0
    """Seconds between the answer before and this turn."""


def plan_arrivals(
    trace: Trace, *, rate: float = 1.0, seed: int = 1, mean_think_s: float = 1.0
) -> tuple[Arrival, ...]:
    """The trace as a plan, the same for every policy it is tried with.

    Timed traces: ``rate`` is how much faster than recorded they run (2.0 halves every gap). Sessions:
    ``rate`` is how many start in a second (Poisson); turns follow after their recorded pause, else after
    an exponential one of ``mean_think_s``.
    """
    rng = random.Random(seed)
    if trace.in_sessions:
        return _sessions(trace, rate, rng, mean_think_s)
    return _timed(trace, rate, rng)


def _timed(trace: Trace, rate: float, rng: random.Random) -> tuple[Arrival, ...]:
    """Ties are spread, evenly at random, up to the next timestamp (Mooncake's clock ticks every 3 s)."""
    times = [request.timestamp_ms or 0.0 for request in trace.requests]
    distinct = sorted(set(times))
    if len(distinct) < len(times):
        gaps = [later - earlier for earlier, later in pairwise(distinct)]
        last = distinct[-1] + (median(gaps) if gaps else DEFAULT_STEP_MS)
        following = dict(zip(distinct, [*distinct[1:], last], strict=True))
        times = [time + rng.random() * (following[time] - time) for time in times]
    order = sorted(range(len(times)), key=times.__getitem__)
    start = times[order[0]] if order else 0.0
    return tuple(Arrival(trace.requests[k], (times[k] - start) / 1e3 / rate) for k in order)


def _sessions(trace: Trace, rate: float, rng: random.Random, mean_think_s: float) -> tuple[Arrival, ...]:
    requests = trace.requests
    plan: list[Arrival] = []
    start_s = 0.0
    for k, request in enumerate(requests):
        follows = k > 0 and requests[k - 1].session == request.session
        last = k + 1 == len(requests) or requests[k + 1].session != request.session
        next_turn = None if last else k + 1
        if follows:
            pause = rng.expovariate(1.0 / mean_think_s) if mean_think_s > 0 else 0.0
            think_s = pause if request.think_ms is None else request.think_ms / 1e3
            plan.append(Arrival(request, None, next_turn, think_s))
        else:
            plan.append(Arrival(request, start_s, next_turn))
            start_s += rng.expovariate(rate)
    return tuple(plan)
