"""One prefix suddenly popular: apps with system prompts of their own, until everybody wants the same.

Before ``hot_from_s`` requests belong to one of many apps. From then on ``hot_share`` of them begin with the
same new prefix: a document that went viral, a prompt that was just deployed.
"""

import random
from dataclasses import dataclass
from itertools import accumulate

from sim.workload.arrival_process import POISSON, ArrivalProcess
from sim.workload.block_names import BlockNames
from sim.workload.lengths import tokens
from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class HotPrefix:
    """What the requests look like. Lengths in tokens are medians of log-normal draws."""

    apps: int = 64
    zipf: float = 0.8
    system_tokens: int = 2_500
    hot_tokens: int = 8_192
    hot_share: float = 0.6
    hot_from_s: float = 60.0
    user_tokens: int = 400
    output_tokens: int = 200
    spread: float = 0.6
    per_s: float = 15.0
    process: ArrivalProcess = POISSON


def hot_prefix_trace(mix: HotPrefix | None = None, *, requests: int = 3_000, seed: int = 1) -> Trace:
    """Timed requests made from ``seed``."""
    mix = mix or HotPrefix()
    rng = random.Random(f"{seed} hot prefix")
    names = BlockNames(BLOCK_TOKENS)
    systems = [tokens(rng, mix.system_tokens, mix.spread) for _ in range(mix.apps)]
    popularity = list(accumulate(1.0 / rank**mix.zipf for rank in range(1, mix.apps + 1)))
    times = mix.process.times_s(mix.per_s, random.Random(f"{seed} hot prefix arrivals"))
    made = []
    for number in range(requests):
        time_s = next(times)
        hot = rng.random() < mix.hot_share and time_s >= mix.hot_from_s
        (app,) = rng.choices(range(mix.apps), cum_weights=popularity)
        own = tokens(rng, mix.user_tokens, mix.spread)
        output = tokens(rng, mix.output_tokens, mix.spread)
        head: tuple[object, int] = ("hot", mix.hot_tokens) if hot else (("app", app), systems[app])
        ids = names.ids([head, (("user", number), own)])
        made.append(TraceRequest(head[1] + own, output, ids, timestamp_ms=1e3 * time_s))
    return Trace("a prefix suddenly popular", BLOCK_TOKENS, tuple(made))
