"""One streamed chat request as a user sees it: when the first token came, what was said, what was cached."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import orjson

Message = dict[str, str]


class ChatError(Exception):
    """The request failed: refused, broken off, or an answer that is no proper stream."""


@dataclass(frozen=True, slots=True)
class Routing:
    """What the router said about its decision, from the response headers."""

    replica: str
    reason: str
    matched_tokens: int


@dataclass(frozen=True, slots=True)
class ChatAnswer:
    """A complete streamed answer. Times are seconds since the request was sent."""

    text: str
    ttft_s: float
    e2e_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    routing: Routing | None

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per token after the first; ``None`` for answers of one token."""
        if self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) * 1_000.0 / (self.output_tokens - 1)


async def stream_chat(
    session: aiohttp.ClientSession,
    url: str,
    messages: Sequence[Message],
    *,
    model: str,
    max_tokens: int,
    timeout_s: float,
) -> ChatAnswer:
    """Send ``messages`` to ``url`` (an OpenAI-compatible server) and read the stream to its end.

    Raises ``ChatError`` unless the stream ended with ``[DONE]`` and told its usage.
    """
    body = {
        "model": model,
        "messages": list(messages),
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    limit = aiohttp.ClientTimeout(total=timeout_s)
    sent_at = time.monotonic()
    try:
        async with session.post(
            url + "/v1/chat/completions",
            data=orjson.dumps(body),
            headers={"content-type": "application/json"},
            timeout=limit,
        ) as response:
            if response.status != 200:
                raise ChatError(f"status {response.status}: {_error_text(await response.read())}")
            return await _read_stream(response, sent_at)
    except TimeoutError:
        raise ChatError(f"no complete answer within {timeout_s:.0f} s") from None
    except aiohttp.ClientError as error:
        raise ChatError(f"connection failed: {error or type(error).__name__}") from None


async def _read_stream(response: aiohttp.ClientResponse, sent_at: float) -> ChatAnswer:
    routing = routing_of(response.headers)
    pieces: list[str] = []
    first_at = last_at = 0.0
    usage: dict[str, Any] | None = None
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            break
        event = _event(data)
        if event.get("usage"):
            usage = event["usage"]
        for choice in event.get("choices", ()):
            if content := choice.get("delta", {}).get("content"):
                last_at = time.monotonic()
                first_at = first_at or last_at
                pieces.append(content)
    else:
        raise ChatError("the stream ended without [DONE]")
    if usage is None:
        raise ChatError("the stream told no usage")
    if not pieces:
        first_at = last_at = time.monotonic()  # an answer without text: its end is all there is to see
    details = usage.get("prompt_tokens_details") or {}
    return ChatAnswer(
        text="".join(pieces),
        ttft_s=first_at - sent_at,
        e2e_s=last_at - sent_at,
        prompt_tokens=int(usage["prompt_tokens"]),
        cached_tokens=int(details.get("cached_tokens") or 0),
        output_tokens=int(usage["completion_tokens"]),
        routing=routing,
    )


def _event(data: bytes) -> dict[str, Any]:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        raise ChatError(f"the stream holds something that is no JSON: {data[:80]!r}") from None
    if not isinstance(event, dict) or "error" in event:
        raise ChatError(f"error in the stream: {_error_text(data)}")
    return event


def _error_text(body: bytes) -> str:
    try:
        return str(orjson.loads(body)["error"]["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")


def routing_of(headers: Mapping[str, str]) -> Routing | None:
    """The decision in ``x-warmroute-*``; ``None`` where nobody exposes it."""
    replica = headers.get("x-warmroute-replica")
    if replica is None:
        return None
    matched = headers.get("x-warmroute-matched-tokens", "0")
    return Routing(replica, headers.get("x-warmroute-reason", ""), int(matched) if matched.isdigit() else 0)
