"""The requests of the overhead bench: chat bodies of an exact size that share only their first words."""

import json
import random

from sim.bench.server_connection import MOCK_MODEL

PROMPTS = 200
"""Different prompts of one size, asked in turn; each begins with its own number."""
_UNITS = 997


def chat_body(number: int, size_kib: int, output_tokens: int, *, stream: bool) -> bytes:
    """A chat request of exactly ``size_kib`` KiB, as compact JSON."""
    request = {
        "model": MOCK_MODEL,
        "messages": [{"role": "user", "content": ""}],
        "max_tokens": output_tokens,
        "stream": stream,
    }
    room = size_kib * 1024 - len(json.dumps(request, separators=(",", ":")))
    text = f"You are a helpful assistant. Tenant {number:06d}."
    words = " ".join(f"w{at % _UNITS:03d}" for at in range(room // 5 + 1))
    request["messages"] = [{"role": "user", "content": f"{text} {words}"[:room]}]
    return json.dumps(request, separators=(",", ":")).encode()


def chat_request(body: bytes) -> bytes:
    """``body`` as an HTTP/1.1 request."""
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )


FIRST_MESSAGES = 40


def conversation_body(chance: random.Random, number: int, size_kib: int) -> bytes:
    """A chat request of some ``size_kib`` KiB, two thirds of it one of ``FIRST_MESSAGES`` first messages."""
    size = size_kib * 1024
    app = chance.randrange(FIRST_MESSAGES)
    system = f"You are assistant {app:02d}. " * (size * 2 // 3 // 22)
    own = f"Question {number}: " + " ".join(
        f"w{at % _UNITS:03d}" for at in range(number, number + size // 15)
    )
    return json.dumps(
        {
            "model": MOCK_MODEL,
            "messages": [{"role": "system", "content": system}, {"role": "user", "content": own}],
            "max_tokens": 100,
            "stream": True,
        },
        separators=(",", ":"),
    ).encode()
