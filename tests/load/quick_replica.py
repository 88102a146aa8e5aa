"""A replica process that answers at once and costs little: for runs that measure the router.

``python -m tests.load.quick_replica --port P --hold-s 10``: streams send one token at once, the rest after
that many seconds.
"""

import argparse
import asyncio
import json
from typing import cast

import uvloop

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    chunk,
    completion,
    delta,
    sized,
    usage_event,
)

HEALTHY = sized(b"")
MODELS = sized(json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}).encode())
FIRST = STREAM_HEAD + chunk(delta("a"))
REST = chunk(delta(None, finish="stop")) + chunk(usage_event(10, 1, 0)) + chunk(DONE_EVENT) + LAST_CHUNK


class QuickConnection(asyncio.Protocol):
    """One connection of the router's, whose requests are trusted to be well formed and have a length."""

    def __init__(self, hold_s: float) -> None:
        self._hold_s = hold_s
        self._buffer = bytearray()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        while (end := buffer.find(b"\r\n\r\n") + 4) >= 4:
            head = bytes(buffer[:end])
            at = head.find(b"content-length: ")
            length = int(head[at + 16 : head.find(b"\r", at)]) if at >= 0 else 0
            if len(buffer) < end + length:
                return
            body = bytes(buffer[end : end + length])
            del buffer[: end + length]
            self._answer(head, body)

    def _answer(self, head: bytes, body: bytes) -> None:
        if head.startswith(b"GET"):
            self._transport.write(MODELS if head.startswith(b"GET /v1/models") else HEALTHY)
        elif b'"stream": true' in body[-100:]:
            self._transport.write(FIRST)
            asyncio.get_running_loop().call_later(self._hold_s, self._transport.write, REST)
        else:
            self._transport.write(sized(completion(prompt=len(body) // 4)))


async def serve(port: int, hold_s: float) -> None:
    """Answer on ``port`` until killed."""
    server = await asyncio.get_running_loop().create_server(
        lambda: QuickConnection(hold_s), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--hold-s", type=float, default=0.0)
    args = parser.parse_args()
    uvloop.run(serve(args.port, args.hold_s))


if __name__ == "__main__":
    main()
