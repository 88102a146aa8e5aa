"""What a replica of the chaos run answers when nothing goes wrong: every prompt has one right answer."""

import hashlib
import json
from typing import Any

from tests.fakes.fake_replica import DONE_EVENT, delta, usage_event

PIECE_CHARACTERS = 8


def request_body(prompt: str, *, stream: bool) -> dict[str, Any]:
    """The chat request for ``prompt``."""
    return {"model": "m", "messages": [{"role": "user", "content": prompt}], "stream": stream}


def right_text(prompt: str) -> str:
    """The reply to ``prompt``."""
    return hashlib.sha256(prompt.encode()).hexdigest()


def right_events(prompt: str) -> list[bytes]:
    """The reply as a stream's events, ``[DONE]`` the last."""
    text = right_text(prompt)
    pieces = [text[at : at + PIECE_CHARACTERS] for at in range(0, len(text), PIECE_CHARACTERS)]
    return [
        delta("", role="assistant"),
        *(delta(piece) for piece in pieces),
        delta(None, finish="stop"),
        usage_event(len(prompt), len(pieces), 0),
        DONE_EVENT,
    ]


def right_body(prompt: str, *, stream: bool) -> bytes:
    """Every byte of the answer's body."""
    if stream:
        return b"".join(right_events(prompt))
    message = {"role": "assistant", "content": right_text(prompt)}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}).encode()
