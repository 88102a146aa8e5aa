"""A seeded mix of chats: some apps with long system prompts, unequally popular, and several turns each."""

import random
from dataclasses import dataclass
from itertools import accumulate, count
from math import log

from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 64
APP_IDS = 1 << 32
"""Block ids of app ``a``'s system prompt start at ``a * APP_IDS``; those of chats come after all apps'."""


@dataclass(frozen=True, slots=True)
class ChatMix:
    """What the chats look like. Lengths in tokens are medians of log-normal draws."""

    chats: int = 400
    apps: int = 24
    zipf: float = 1.0
    """Popularity of the k-th app is proportional to ``1 / k ** zipf``."""
    system_tokens: int = 2000
    user_tokens: int = 120
    output_tokens: int = 220
    spread: float = 0.7
    """Standard deviation of the logarithms."""
    mean_turns: float = 4.0
    """Turns per chat are geometric."""
    mean_think_s: float = 8.0


def chat_trace(mix: ChatMix | None = None, *, requests: int | None = None, seed: int = 1) -> Trace:
    """Sessions made from ``seed``: the same seed gives the same trace, on every machine.

    With ``requests`` as many chats as that takes, whatever the mix says; they begin with the same chats. A
    turn's prompt is the app's system prompt, the chat so far, and a new question; so turn ``t`` begins
    with all of turn ``t - 1`` and its answer.
    """
    mix = mix or ChatMix()
    rng = random.Random(seed)
    systems = [_tokens(rng, mix.system_tokens, mix.spread) for _ in range(mix.apps)]
    popularity = list(accumulate(1.0 / rank**mix.zipf for rank in range(1, mix.apps + 1)))
    heads = [list(range(a * APP_IDS, a * APP_IDS + n // BLOCK_TOKENS)) for a, n in enumerate(systems)]
    next_id = mix.apps * APP_IDS
    out: list[TraceRequest] = []
    for chat in count() if requests is not None else range(mix.chats):
        if requests is not None and len(out) >= requests:
            break
        app = rng.choices(range(mix.apps), cum_weights=popularity)[0]
        ids = list(heads[app])
        length = systems[app]
        turns = 1 + int(log(1.0 - rng.random()) / log(1.0 - 1.0 / mix.mean_turns))
        for turn in range(turns):
            length += _tokens(rng, mix.user_tokens, mix.spread)
            answer = _tokens(rng, mix.output_tokens, mix.spread)
            fresh = length // BLOCK_TOKENS - len(ids)
            ids.extend(range(next_id, next_id + fresh))
            next_id += fresh
            think_ms = rng.expovariate(1.0 / mix.mean_think_s) * 1e3 if turn else None
            out.append(TraceRequest(length, answer, tuple(ids), session=f"chat {chat}", think_ms=think_ms))
            length += answer
    return Trace("chats", BLOCK_TOKENS, tuple(out[:requests]))


def _tokens(rng: random.Random, middle: int, spread: float) -> int:
    return max(1, round(rng.lognormvariate(log(middle), spread)))
