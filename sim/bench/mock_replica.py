"""A replica that computes nothing: answers at once, streams one event per tick, costs little CPU.

``python -m sim.bench.mock_replica PORT``.
"""

import asyncio
import re
import sys
import time

import uvloop

from sim.bench.server_connection import (
    STREAM_HEAD,
    ServerConnection,
    completion,
    event,
    last_events,
)

TICK_S = 0.02
"""Every open stream gets one event so often: a decode step of 20 ms."""
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_USAGE = b'{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}'
ANSWER = completion(_USAGE)
_TOKEN = event(
    b'"sent_ns":"%020d","choices":[{"index":0,"delta":{"content":" tok"},"finish_reason":null}]' % 0
).replace(b"%020d" % 0, b"%020d")
"""``sent_ns``: the machine's monotonic clock, so that the load can tell how long an event was under way."""
LAST_EVENTS = last_events(_USAGE)


class MockReplica:
    """The open streams of one process, and the one timer that feeds them."""

    def __init__(self) -> None:
        self._left: dict[ServerConnection, int] = {}
        self._ticking = False

    def connection(self) -> ServerConnection:
        """For one more connection."""
        return ServerConnection(self._posted, self._lost, lambda: b"")

    def _posted(self, connection: ServerConnection, body: bytes) -> None:
        if _STREAM.search(body) is None:
            connection.write(ANSWER)
            return
        most = _MAX_TOKENS.search(body)
        connection.write(STREAM_HEAD)
        self._left[connection] = int(most[1]) if most else 1
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _lost(self, connection: ServerConnection) -> None:
        self._left.pop(connection, None)

    def _tick(self) -> None:
        token = _TOKEN % time.monotonic_ns()
        for connection, left in list(self._left.items()):
            if left > 1:
                self._left[connection] = left - 1
                connection.write(token)
            else:
                del self._left[connection]
                connection.write(token + LAST_EVENTS)
        self._ticking = bool(self._left)
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)


async def serve(port: int) -> None:
    """Answer on ``port`` of loopback until killed."""
    server = await asyncio.get_running_loop().create_server(
        MockReplica().connection, "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
