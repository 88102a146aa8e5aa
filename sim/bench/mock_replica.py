"""A replica that computes nothing: answers at once, streams one event per tick, costs little CPU.

``python -m sim.bench.mock_replica PORT``. It speaks enough of OpenAI's, vLLM's and SGLang's routes for
routers to take it for a healthy worker.
"""

import asyncio
import re
import sys
from typing import cast

import httptools
import uvloop

TICK_S = 0.02
"""Every open stream gets one event so often: a decode step of 20 ms."""
MOCK_MODEL = "mock"
_MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens":\s*(\d+)')
_STREAM = re.compile(rb'"stream":\s*true')
_USAGE = b'"usage":{"prompt_tokens":512,"completion_tokens":16,"total_tokens":528}'
_CHOICE = b'"choices":[{"index":0,%b,"finish_reason":%b}]'
_CHUNK = b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"mock",%b}\n\n'


def _sized(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )


def _chunk(payload: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(payload), payload)


ANSWER = _sized(
    b'{"id":"c","object":"chat.completion","created":1,"model":"mock",%b,%b}'
    % (_CHOICE % (b'"message":{"role":"assistant","content":"mock"}', b'"stop"'), _USAGE)
)
ABOUT = _sized(
    b'{"status":"ok","object":"list","data":[{"id":"mock","object":"model","owned_by":"mock"}],'
    b'"model_path":"mock","served_model_name":"mock","is_generation":true,"load":0}'
)
METRICS = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncontent-length: 0\r\n\r\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = _chunk(_CHUNK % (_CHOICE % (b'"delta":{"content":" tok"}', b"null")))
LAST_EVENTS = (
    _chunk(_CHUNK % (_CHOICE % (b'"delta":{}', b'"stop"')))
    + _chunk(_CHUNK % (b'"choices":[],' + _USAGE))
    + _chunk(b"data: [DONE]\n\n")
    + b"0\r\n\r\n"
)


class Streams:
    """The open streams of one process, and the one timer that feeds them."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Transport, int] = {}
        self._ticking = False

    def opened(self, transport: asyncio.Transport, events: int) -> None:
        """``transport`` gets ``events`` events, one per tick."""
        self._left[transport] = events
        if not self._ticking:
            self._ticking = True
            asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def closed(self, transport: asyncio.Transport) -> None:
        """The router hung up."""
        self._left.pop(transport, None)

    def _tick(self) -> None:
        for transport, left in list(self._left.items()):
            if left > 1:
                self._left[transport] = left - 1
                transport.write(EVENT)
            else:
                del self._left[transport]
                transport.write(EVENT + LAST_EVENTS)
        self._ticking = bool(self._left)
        if self._ticking:
            asyncio.get_running_loop().call_later(TICK_S, self._tick)


class MockConnection(asyncio.Protocol):
    """One connection of a router's."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._streams.closed(self._transport)

    def on_message_begin(self) -> None:
        """From the parser."""
        self._path = b""
        self._body.clear()

    def on_url(self, url: bytes) -> None:
        """From the parser."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """From the parser."""
        self._body.append(body)

    def on_message_complete(self) -> None:
        """From the parser."""
        if self._parser.get_method() != b"POST":
            self._transport.write(METRICS if self._path.startswith(b"/metrics") else ABOUT)
            return
        body = b"".join(self._body)
        self._body.clear()
        if _STREAM.search(body) is None:
            self._transport.write(ANSWER)
        else:
            most = _MAX_TOKENS.search(body)
            self._transport.write(STREAM_HEAD)
            self._streams.opened(self._transport, int(most[1]) if most else 1)


async def serve(port: int) -> None:
    """Answer on ``port`` of loopback until killed."""
    streams = Streams()
    server = await asyncio.get_running_loop().create_server(
        lambda: MockConnection(streams), "127.0.0.1", port, backlog=4096
    )
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
