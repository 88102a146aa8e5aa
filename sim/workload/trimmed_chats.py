"""Conversations that get trimmed: beyond a limit the oldest messages after the system prompt are dropped.

Dropping one message moves every later one: from then on each turn shares nothing with the turn before it but
the system prompt, and the whole conversation is prefilled again, turn after turn.
"""

import random
from dataclasses import dataclass
from math import log

from sim.workload.block_names import BlockNames, Segment
from sim.workload.lengths import tokens
from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class TrimmedChats:
    """What the chats look like. Lengths in tokens are medians of log-normal draws."""

    limit_tokens: int | None = 4_000
    """Longest prompt; ``None``: nothing is ever dropped."""
    system_tokens: int = 1_000
    user_tokens: int = 120
    output_tokens: int = 300
    spread: float = 0.5
    mean_turns: float = 14.0
    """Turns per chat are geometric."""
    mean_think_s: float = 8.0


def trimmed_chats_trace(mix: TrimmedChats | None = None, *, requests: int = 2_000, seed: int = 1) -> Trace:
    """Sessions made from ``seed``, ``requests`` turns in all. What is said does not depend on the limit."""
    mix = mix or TrimmedChats()
    rng = random.Random(f"{seed} trimmed chats")
    names = BlockNames(BLOCK_TOKENS)
    made: list[TraceRequest] = []
    chat = 0
    while len(made) < requests:
        said: list[Segment] = []
        turns = 1 + int(log(1.0 - rng.random()) / log(1.0 - 1.0 / mix.mean_turns))
        for turn in range(turns):
            said.append(((chat, turn, "user"), tokens(rng, mix.user_tokens, mix.spread)))
            answer = tokens(rng, mix.output_tokens, mix.spread)
            think_ms = rng.expovariate(1.0 / mix.mean_think_s) * 1e3 if turn else None
            kept = _kept(said, mix)
            total = mix.system_tokens + sum(length for _, length in kept)
            ids = names.ids([("system", mix.system_tokens), *kept])
            made.append(TraceRequest(total, answer, ids, session=f"chat {chat}", think_ms=think_ms))
            said.append(((chat, turn, "answer"), answer))
        chat += 1
    return Trace("chats that get trimmed", BLOCK_TOKENS, tuple(made[:requests]))


def _kept(said: list[Segment], mix: TrimmedChats) -> list[Segment]:
    """The latest messages that fit, the newest always."""
    if mix.limit_tokens is None:
        return list(said)
    room = mix.limit_tokens - mix.system_tokens
    kept: list[Segment] = []
    for segment in reversed(said):
        room -= segment[1]
        if room < 0 and kept:
            break
        kept.append(segment)
    return kept[::-1]
