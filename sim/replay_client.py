"""One streamed request to a running router, from the first byte sent to the last one read."""

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import aiohttp
import orjson

from sim.connection_trouble import connection_trouble
from sim.sse import EventStream

DETAIL_CHARACTERS = 300
CLUMPED_NS = 5_000_000
"""Events sent so far apart are not sent at once."""
_SENT = re.compile(rb'"sent_ns":\s*"?(\d+)')
CONTENT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "function_call")
"""Of a delta. vLLM calls reasoning either way, by its version."""


@dataclass(slots=True)
class Answer:
    """What came back. Times are seconds from the request's start; ``None`` is "never" or "not told"."""

    ttft_s: float | None = None
    """To the first event with content: not the headers, not an event that only names the role."""
    e2e_s: float = 0.0
    error: str | None = None
    """What went wrong, in few words that can be counted."""
    error_detail: str = ""
    """What the server said about it."""
    text: str = ""
    content_events: int = 0
    """An event may carry several tokens."""
    clumped_events: int = 0
    """Of these, how many came in one piece with the one before, though sent later where stamps tell."""
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    replica: str | None = None
    reason: str | None = None
    matched_tokens: int | None = None
    """Prompt tokens that the router believed to be cached."""


async def stream_request(
    session: aiohttp.ClientSession,
    url: str,
    body: bytes,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_content: Callable[[float], None] | None = None,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
) -> Answer:
    """POST ``body`` and read the stream to its end. Never raises: what goes wrong is the answer's ``error``.

    ``on_content`` is told when each event with content came, by ``clock``; ``on_event`` gets every event.

    A stream counts only if it ends with ``[DONE]``; an error event in it, a broken transfer and a silent end
    are errors, however much came before.
    """
    answer = Answer()
    started_s = clock()

    def content_came() -> None:
        now = clock()
        answer.content_events += 1
        if answer.ttft_s is None:
            answer.ttft_s = now - started_s
        if on_content is not None:
            on_content(now)

    try:
        async with session.post(
            url, data=body, headers={"content-type": "application/json", "accept": "text/event-stream"}
        ) as response:
            _take_routing(response.headers, answer)
            if response.status != 200:
                answer.error = f"status {response.status}"
                answer.error_detail = (await response.text(errors="replace"))[:DETAIL_CHARACTERS]
            else:
                await _read(response, answer, content_came, on_event)
    except TimeoutError:
        answer.error = "timed out"
    except aiohttp.ClientPayloadError:
        answer.error = "truncated: the transfer broke"
    except (aiohttp.ClientError, OSError) as error:
        answer.error = f"connection failed: {connection_trouble(error)}"
    answer.e2e_s = clock() - started_s
    return answer


def _take_routing(headers: Mapping[str, str], answer: Answer) -> None:
    answer.replica = headers.get("x-warmroute-replica")
    answer.reason = headers.get("x-warmroute-reason")
    matched = headers.get("x-warmroute-matched-tokens", "")
    answer.matched_tokens = int(matched) if matched.isdecimal() else None


async def _read(
    response: aiohttp.ClientResponse,
    answer: Answer,
    content_came: Callable[[], None],
    on_event: Callable[[Mapping[str, Any]], None] | None,
) -> None:
    events = EventStream()
    async for received in response.content.iter_any():
        pieces = list(events.feed(received))
        seen = answer.content_events
        for data in pieces:
            if data == b"[DONE]":
                if answer.ttft_s is None:  # an answer without text: its end is all there is to see
                    content_came()
                break
            _take(data, answer, content_came, on_event)
            if answer.error is not None:
                return
        answer.clumped_events += clumped(pieces, answer.content_events - seen)
        if b"[DONE]" in pieces:
            return
    answer.error = "truncated: the stream ended without [DONE]"


def clumped(pieces: Sequence[bytes], content_events: int) -> int:
    """Of the ``content_events`` events with content in one read, how many were collected on the way.

    All after the first; where the replica stamps each with ``sent_ns``, those that it sent later.

    >>> clumped([b'{"sent_ns":"5000000"}', b'{"sent_ns":"5100000"}', b'{"sent_ns":"25000000"}'], 3)
    1
    """
    sent = [int(stamp[1]) for data in pieces if (stamp := _SENT.search(data))]
    if len(sent) == content_events:
        return sum(after - before >= CLUMPED_NS for before, after in pairwise(sent))
    return max(0, content_events - 1)


def _take(
    data: bytes,
    answer: Answer,
    content_came: Callable[[], None],
    on_event: Callable[[Mapping[str, Any]], None] | None,
) -> None:
    try:
        event = orjson.loads(data)
    except orjson.JSONDecodeError:
        event = None
    if type(event) is not dict:
        answer.error = "garbage: an event that is no JSON object"
        return
    if event.get("error"):
        answer.error = "error event in the stream"
        answer.error_detail = data[:DETAIL_CHARACTERS].decode("utf-8", "replace")
        return
    if on_event is not None:
        on_event(event)
    choices = event.get("choices") or ()
    for choice in choices:
        answer.text += (choice.get("delta") or {}).get("content") or choice.get("text") or ""
    if any(_has_content(choice) for choice in choices):
        content_came()
    usage = event.get("usage")
    if type(usage) is dict:
        answer.prompt_tokens = usage.get("prompt_tokens")
        answer.output_tokens = usage.get("completion_tokens")
        answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def _has_content(choice: dict[str, Any]) -> bool:
    """Whether a choice of an event holds a token, of whatever is shown or not.

    >>> _has_content({"delta": {"content": ""}}), _has_content({"delta": {"reasoning": "so"}})
    (False, True)
    """
    delta = choice.get("delta") or {}
    return bool(choice.get("text") or any(delta.get(field) for field in CONTENT_FIELDS))
