"""Traces made by hand for tests."""

import random
from collections.abc import Sequence

from sim.workload.trace import Trace, TraceRequest


def timed(rows: Sequence[tuple[float, int, int, tuple[int, ...]]], block_tokens: int = 512) -> Trace:
    """A timed trace of (milliseconds, prompt tokens, output tokens, block ids)."""
    return Trace(
        "made by hand",
        block_tokens,
        tuple(TraceRequest(prompt, output, ids, timestamp_ms=at) for at, prompt, output, ids in rows),
    )


def poisson(requests: int, mean_gap_s: float, prompt_tokens: list[int], seed: int) -> Trace:
    """Requests of one output token at Poisson times, of which nothing can be cached."""
    rng = random.Random(seed)
    at_ms = 0.0
    rows = []
    for number in range(requests):
        rows.append((at_ms, prompt_tokens[number % len(prompt_tokens)], 1, ()))
        at_ms += 1e3 * rng.expovariate(1.0 / mean_gap_s)
    return timed(rows, block_tokens=1 << 20)
