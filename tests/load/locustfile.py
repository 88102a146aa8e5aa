"""Streaming chat users for locust: several system prompts, history, think time.

Three entries: ``answer`` (a whole stream, first byte to ``[DONE]``), ``TTFT`` and ``inter-token`` (one
sample per answer: its mean time per token after the first; tokens as ``usage`` counts them, since an
event may carry several). A stream that breaks off, carries an error or ends without ``[DONE]`` is a
failure of ``answer``, whatever its status was.

locust's own FastHttpUser is not used: its ``iter_content`` waits until a whole chunk size has come, so
it would not see tokens as they arrive. ``http.client``, on sockets that gevent has patched, does.
"""

import http.client
import json
import os
import random
import sys
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

from locust import User, between, events, task

from sim.demo.personas import PERSONAS

MODEL = os.environ.get("LOAD_MODEL", "tiny")
SYSTEM_CHARACTERS = int(os.environ.get("LOAD_SYSTEM_CHARACTERS", "700"))
MAX_TOKENS = int(os.environ.get("LOAD_MAX_TOKENS", "16"))
TURNS = 3
TIMEOUT_S = 30.0


class BadStream(Exception):
    """The answer is no complete stream of tokens."""


class ChatUser(User):
    """Holds one conversation after another, each request with the whole history."""

    wait_time = between(0.2, 1.0)

    def on_start(self) -> None:
        """Nothing said yet."""
        self.messages: list[dict[str, str]] = []
        self.connection: http.client.HTTPConnection | None = None

    @task
    def next_turn(self) -> None:
        """Say the next thing, read the answer; after the last turn or a failure begin anew."""
        if not self.messages or len(self.messages) > 2 * TURNS:
            self.persona = random.choice(PERSONAS)
            self.messages = [{"role": "system", "content": self.persona.system[:SYSTEM_CHARACTERS]}]
        says = random.choice(self.persona.openings if len(self.messages) == 1 else self.persona.follow_ups)
        self.messages.append({"role": "user", "content": says[:120]})
        began = time.perf_counter()
        try:
            text = self._ask(began)
        except (BadStream, OSError, http.client.HTTPException) as error:
            if self.connection is not None:
                self.connection.close()
                self.connection = None
            self.messages = []
            _report("answer", began, error=error)
            return
        self.messages.append({"role": "assistant", "content": text})

    def _ask(self, began: float) -> str:
        address = urlsplit(str(self.host))
        if self.connection is None:
            assert address.hostname is not None
            self.connection = http.client.HTTPConnection(address.hostname, address.port, timeout=TIMEOUT_S)
        body = {
            "model": MODEL,
            "messages": self.messages,
            "max_tokens": MAX_TOKENS,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        self.connection.request(
            "POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"}
        )
        response = self.connection.getresponse()
        if response.status != 200:
            raise BadStream(f"status {response.status}: {response.read(200)!r}")
        pieces: list[str] = []
        first = last = 0.0
        tokens = None
        for event in _events(response):
            if event.get("usage"):
                tokens = event["usage"]["completion_tokens"]
            content = "".join(choice["delta"].get("content") or "" for choice in event.get("choices", ()))
            if content:
                last = time.perf_counter()
                if not pieces:
                    first = last
                    _report("TTFT", began, until=first)
                pieces.append(content)
        response.read()  # what follows [DONE]: the end of the body, so that the connection can be used again
        if tokens is None:
            raise BadStream("no usage in the stream")
        if tokens > 1 and len(pieces) > 1:
            _report("inter-token", first, until=first + (last - first) / (tokens - 1))
        _report("answer", began, tokens=tokens)
        return "".join(pieces)


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def fail_without_answers(environment: Any, **_: Any) -> None:
    """A run in which nothing was answered is a failed run."""
    if not environment.stats.get("answer", "chat").num_requests:
        print("load: no answer was counted; is the server reachable?", file=sys.stderr)
        environment.process_exit_code = 1


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


def _report(
    name: str, began: float, *, until: float | None = None, tokens: int = 0, error: Exception | None = None
) -> None:
    ended = time.perf_counter() if until is None else until
    events.request.fire(  # type: ignore[no-untyped-call]
        request_type="chat",
        name=name,
        response_time=(ended - began) * 1_000.0,
        response_length=tokens,
        exception=error,
    )
