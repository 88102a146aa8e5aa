"""One streamed chat request for locust users, seen event by event.

locust's own FastHttpUser is not used: its ``iter_content`` waits until a whole chunk size has come, so
it would not see tokens as they arrive. ``http.client``, on sockets that gevent has patched, does.
"""

import http.client
import json
import os
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from locust import events

MODEL = os.environ.get("LOAD_MODEL", "tiny")
MAX_TOKENS = int(os.environ.get("LOAD_MAX_TOKENS", "16"))
TIMEOUT_S = 30.0
CLUMPED_S = 0.001
"""No decode step is so short: what comes so soon after another was collected on the way, or sent so."""

Message = dict[str, Any]


class BadStream(Exception):
    """The answer is no complete stream of tokens."""


class Usage:
    """Tokens of all answers of this run, as ``usage`` counted them."""

    prompt = 0
    cached = 0
    events = 0
    """With content."""
    clumped = 0
    """Of these, how many came within ``CLUMPED_S`` of the one before."""


class StreamClient:
    """One user's connection. Entries of the type ``kind``: ``answer``, ``TTFT``, ``inter-token``."""

    def __init__(self, host: str, kind: str) -> None:
        self._address = urlsplit(host)
        self._kind = kind
        self._connection: http.client.HTTPConnection | None = None

    def ask(self, messages: list[Message], **fields: Any) -> str | None:
        """The answer's text; ``None`` if there was no whole one, which is counted as a failure."""
        began = time.perf_counter()
        try:
            return self._ask(began, messages, fields)
        except (BadStream, OSError, http.client.HTTPException) as error:
            if self._connection is not None:
                self._connection.close()
                self._connection = None
            self._report("answer", began, error=error)
            return None

    def _ask(self, began: float, messages: list[Message], fields: dict[str, Any]) -> str:
        if self._connection is None:
            assert self._address.hostname is not None
            self._connection = http.client.HTTPConnection(
                self._address.hostname, self._address.port, timeout=TIMEOUT_S
            )
        body = {
            "model": MODEL,
            "messages": messages,
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        } | fields
        self._connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = self._connection.getresponse()
        if response.status != 200:
            raise BadStream(f"status {response.status}: {response.read(200)!r}")
        pieces: list[str] = []
        first = last = 0.0
        usage = None
        for event in _events(response):
            usage = event.get("usage") or usage
            content = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if content:
                before, last = last, time.perf_counter()
                Usage.events += 1
                Usage.clumped += bool(pieces) and last - before < CLUMPED_S
                if not pieces:
                    first = last
                    self._report("TTFT", began, until=first)
                pieces.append(content)
        response.read()  # what follows [DONE]: the end of the body, so that the connection can be used again
        if usage is None:
            raise BadStream("no usage in the stream")
        tokens = usage["completion_tokens"]
        Usage.prompt += usage.get("prompt_tokens", 0)
        Usage.cached += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        if tokens > 1 and len(pieces) > 1:
            self._report("inter-token", first, until=first + (last - first) / (tokens - 1))
        self._report("answer", began, tokens=tokens)
        return "".join(pieces)

    def _report(
        self,
        name: str,
        began: float,
        *,
        until: float | None = None,
        tokens: int = 0,
        error: Exception | None = None,
    ) -> None:
        ended = time.perf_counter() if until is None else until
        events.request.fire(  # type: ignore[no-untyped-call]
            request_type=self._kind,
            name=name,
            response_time=(ended - began) * 1_000.0,
            response_length=tokens,
            exception=error,
        )


def _events(response: http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The events' data, decoded, up to ``[DONE]``; raises ``BadStream`` when it does not come."""
    while line := response.readline():
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        event = json.loads(data)
        if "error" in event:
            raise BadStream(f"error in the stream: {event['error']}")
        yield event
    raise BadStream("truncated: the stream ended without [DONE]")
