"""Requests that share nothing, of log-normal lengths: what is left of routing is balance."""

import random
from dataclasses import dataclass
from itertools import count

from sim.workload.arrival_process import POISSON, ArrivalProcess
from sim.workload.lengths import tokens
from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class Strangers:
    """What the requests look like. Lengths in tokens are medians of log-normal draws."""

    prompt_tokens: int = 2_000
    output_tokens: int = 200
    spread: float = 1.0
    per_s: float = 10.0
    process: ArrivalProcess = POISSON


def strangers_trace(mix: Strangers | None = None, *, requests: int = 2_000, seed: int = 1) -> Trace:
    """Timed requests made from ``seed``."""
    mix = mix or Strangers()
    rng = random.Random(f"{seed} strangers")
    ids = count()
    times = mix.process.times_s(mix.per_s, random.Random(f"{seed} strangers arrivals"))
    made = []
    for _ in range(requests):
        prompt = tokens(rng, mix.prompt_tokens, mix.spread)
        output = tokens(rng, mix.output_tokens, mix.spread)
        blocks = tuple(next(ids) for _ in range(prompt // BLOCK_TOKENS))
        made.append(TraceRequest(prompt, output, blocks, timestamp_ms=1e3 * next(times)))
    return Trace("strangers", BLOCK_TOKENS, tuple(made))
