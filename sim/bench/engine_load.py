"""One engine over HTTP: cold and warm TTFT, decode alone and at 8, and requests that share a prefix."""

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

import aiohttp
import orjson

from sim.bench.process_cpu import cpu_s
from sim.demo.processes import ChildError
from sim.sse import EventStream

COMMON = (
    "time year people way day man thing woman life child world school state family student group "
    "country problem hand part place case week company system program question work number night "
    "point home water room mother area money story fact month lot right study book eye job word "
    "business issue side kind head house service friend father power hour game line end member law "
    "car city community name"
)
WORDS = tuple(COMMON.split())
REQUEST_LIMIT_S = 600.0
ALONE_TOKENS, EIGHT_TOKENS = 96, 64
SHARERS, SHARERS_TOKENS, SHARERS_OWN_WORDS = 16, 16, 40
HIT_FRACTIONS = (0.25, 0.5, 0.75, 0.9)
PAIRS = 2
"""Cold prompts of a round for each fraction, each with one that shares so much of it right after."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt nobody has, and right after it one that shares its first words: a busy moment meets both."""

    cold_ms: float
    warm_ms: float
    hit: float
    """Fraction of the second that was cached, as reported."""

    @property
    def ratio(self) -> float:
        """Cold over warm TTFT."""
        return self.cold_ms / self.warm_ms


@dataclass(frozen=True, slots=True)
class EngineFigures:
    """One round. Times in ms unless named otherwise; CPU is of all the engine's processes."""

    prompt_tokens: int
    cold_ms: float
    cold_cpu_ms: float
    warm_ms: float
    """The same prompt but for its last words."""
    warm_cached_tokens: int
    decode_tok_s: float
    decode_8_tok_s: float
    decode_8_cpu_ms: float
    """CPU per step of eight tokens."""
    shared_s: float
    """16 requests with 500 tokens in common, 40 of their own and 16 to generate, all at once."""
    hits: dict[float, list[Pair]]
    """By shared fraction of the prompt."""


@dataclass(slots=True)
class _Answer:
    ttft_s: float
    times: list[float]
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


async def measure_engine(
    url: str, model: str, pid: int, words: int, seed: int, progress: Callable[[], None]
) -> EngineFigures:
    """One round against a server at ``url``, process ``pid``; prompts of ``words`` words, one token each.

    ``progress`` is called after each of the six parts. Raises ``ChildError`` for an answer that is no answer.
    """
    chance = random.Random(seed)
    timeout = aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session:

        async def ask(prompt: str, tokens: int) -> _Answer:
            return await _ask(session, url, model, prompt, tokens)

        stem = _text(chance, words - 1)
        began = cpu_s(pid)
        cold = await ask(f"{stem} first", 1)
        cold_cpu = cpu_s(pid) - began
        progress()
        warm = await ask(f"{stem} second", 1)
        progress()
        hits: dict[float, list[Pair]] = {share: [] for share in HIT_FRACTIONS}
        for share in HIT_FRACTIONS * PAIRS:
            stem = _text(chance, words)
            first = await ask(stem, 1)
            shared = stem.split()[: int(words * share)]
            one = await ask(" ".join(shared) + " " + _text(chance, words - len(shared)), 1)
            hits[share].append(
                Pair(first.ttft_s * 1e3, one.ttft_s * 1e3, one.cached_tokens / one.prompt_tokens)
            )
        progress()
        alone = await ask(_text(chance, 20), ALONE_TOKENS)
        progress()
        began = cpu_s(pid)
        eight = await asyncio.gather(*(ask(_text(chance, 20), EIGHT_TOKENS) for _ in range(8)))
        eight_cpu = cpu_s(pid) - began
        progress()
        stem = _text(chance, words // 2)
        sharers = [f"{stem} {_text(chance, SHARERS_OWN_WORDS)}" for _ in range(SHARERS)]
        started = time.perf_counter()
        await asyncio.gather(*(ask(prompt, SHARERS_TOKENS) for prompt in sharers))
        shared_s = time.perf_counter() - started
        progress()
    span = max(one.times[-1] for one in eight) - min(one.times[0] for one in eight)
    return EngineFigures(
        prompt_tokens=cold.prompt_tokens,
        cold_ms=cold.ttft_s * 1e3,
        cold_cpu_ms=cold_cpu * 1e3,
        warm_ms=warm.ttft_s * 1e3,
        warm_cached_tokens=warm.cached_tokens,
        decode_tok_s=(alone.output_tokens - 1) / (alone.times[-1] - alone.times[0]),
        decode_8_tok_s=sum(one.output_tokens - 1 for one in eight) / span,
        decode_8_cpu_ms=eight_cpu * 1e3 / EIGHT_TOKENS,
        shared_s=shared_s,
        hits=hits,
    )


async def _ask(session: aiohttp.ClientSession, url: str, model: str, prompt: str, max_tokens: int) -> _Answer:
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    started = time.perf_counter()
    times: list[float] = []
    usage = None
    async with session.post(f"{url}/v1/completions", json=body) as answer:
        if answer.status != 200:
            raise ChildError(f"{url} answered {answer.status}: {await answer.text()}")
        events = EventStream()
        async for piece in answer.content.iter_any():
            for data in events.feed(piece):
                if data == b"[DONE]":
                    continue
                event = orjson.loads(data)
                if event.get("choices"):
                    times.append(time.perf_counter())
                usage = event.get("usage") or usage
    if not times or usage is None:
        raise ChildError(f"{url}: an answer without tokens or usage")
    details = usage.get("prompt_tokens_details") or {}
    return _Answer(
        times[0] - started,
        times,
        usage["prompt_tokens"],
        details.get("cached_tokens") or 0,
        usage["completion_tokens"],
    )


def _text(chance: random.Random, words: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(words))
