"""Asks one server for greedy answers, several at once, token by token with log-probabilities."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

from sim.replay_client import Answer, stream_request

CONNECT_LIMIT_S = 10.0
TOP_LOGPROBS = 5
"""Alternatives asked for at every position; every server with log-probabilities gives so many."""
REFUSED = ("status 400", "status 422")


@dataclass(frozen=True, slots=True)
class TokenAnswer:
    """One answer. Without log-probabilities its tokens are words."""

    tokens: tuple[str, ...]
    tops: tuple[Mapping[str, float], ...]
    """Per position, log-probabilities of the likeliest tokens; empty without."""
    ttft_s: float | None
    e2e_s: float
    error: str | None = None


@dataclass(frozen=True, slots=True)
class AskSettings:
    """How prompts are sent."""

    model: str
    output_tokens: int = 32
    """Fewer where the prompt asks for fewer."""
    concurrency: int = 8
    silence_limit_s: float = 300.0
    headers: Mapping[str, str] | None = None


async def token_answers(
    url: str,
    bodies: Sequence[Mapping[str, Any]],
    settings: AskSettings,
    progress: Callable[[int], None],
) -> list[TokenAnswer]:
    """One answer per body, in order; ``progress`` gets how many are there. Never raises for a request."""
    limits = aiohttp.ClientTimeout(
        total=None, sock_connect=CONNECT_LIMIT_S, sock_read=settings.silence_limit_s
    )
    turns = asyncio.Semaphore(settings.concurrency)
    done = 0

    async with aiohttp.ClientSession(
        timeout=limits, connector=aiohttp.TCPConnector(limit=0), headers=settings.headers
    ) as session:

        async def ask(body: Mapping[str, Any]) -> TokenAnswer:
            nonlocal done
            async with turns:
                answer = await _ask(session, url, body, settings, logprobs=True)
                if answer.error in REFUSED:  # a server without log-probabilities
                    answer = await _ask(session, url, body, settings, logprobs=False)
            done += 1
            progress(done)
            return answer

        return list(await asyncio.gather(*(ask(body) for body in bodies)))


async def _ask(
    session: aiohttp.ClientSession,
    url: str,
    body: Mapping[str, Any],
    settings: AskSettings,
    *,
    logprobs: bool,
) -> TokenAnswer:
    chat = "messages" in body
    most = body.get("max_completion_tokens") or body.get("max_tokens")
    sent = {name: value for name, value in body.items() if name != "max_completion_tokens"} | {
        "model": settings.model,
        "max_tokens": min(settings.output_tokens, most) if type(most) is int else settings.output_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if logprobs:
        sent |= {"logprobs": True, "top_logprobs": TOP_LOGPROBS} if chat else {"logprobs": TOP_LOGPROBS}
    tokens: list[str] = []
    tops: list[Mapping[str, float]] = []

    def take(event: Mapping[str, Any]) -> None:
        for choice in event.get("choices") or ():
            _take_logprobs(choice.get("logprobs") or {}, tokens, tops)

    path = "/v1/chat/completions" if chat else "/v1/completions"
    answer = await stream_request(session, url.rstrip("/") + path, orjson.dumps(sent), on_event=take)
    return _token_answer(answer, tokens, tops)


def _take_logprobs(found: Mapping[str, Any], tokens: list[str], tops: list[Mapping[str, float]]) -> None:
    """The forms of chat completions, and of text completions."""
    for entry in found.get("content") or ():
        tokens.append(str(entry.get("token")))
        tops.append({str(one["token"]): float(one["logprob"]) for one in entry.get("top_logprobs") or ()})
    listed = found.get("tokens")
    if isinstance(listed, list):
        tokens += map(str, listed)
        top = found.get("top_logprobs") or [{}] * len(listed)
        tops += [{str(name): float(value) for name, value in (one or {}).items()} for one in top]


def _token_answer(answer: Answer, tokens: list[str], tops: list[Mapping[str, float]]) -> TokenAnswer:
    if not tokens:
        return TokenAnswer(tuple(answer.text.split()), (), answer.ttft_s, answer.e2e_s, answer.error)
    return TokenAnswer(tuple(tokens), tuple(tops), answer.ttft_s, answer.e2e_s, answer.error)
