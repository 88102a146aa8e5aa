"""The server side of a pretended replica: a connection whose requests are parsed, answers of any shape."""

import asyncio
from collections.abc import Callable
from typing import Any, cast

import httptools
import orjson

STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
LAST_CHUNK = b"0\r\n\r\n"
MOCK_MODEL = "mock"
"""What every pretended replica serves."""


def sized(body: bytes, content_type: bytes = b"application/json", status: bytes = b"200 OK") -> bytes:
    """A whole answer."""
    head = b"HTTP/1.1 %b\r\ncontent-type: %b\r\ncontent-length: %d\r\n\r\n" % (
        status,
        content_type,
        len(body),
    )
    return head + body


def chunk(payload: bytes) -> bytes:
    """A piece of a stream."""
    return b"%x\r\n%b\r\n" % (len(payload), payload)


def event(data: bytes) -> bytes:
    """One event of a chat stream; ``data``: what stands in its object beside the usual."""
    return chunk(
        b'data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"mock",%b}\n\n' % data
    )


def completion(usage: bytes) -> bytes:
    """A whole chat answer."""
    return sized(
        b'{"id":"c","object":"chat.completion","created":1,"model":"mock","choices":[{"index":0,'
        b'"message":{"role":"assistant","content":"mock"},"finish_reason":"stop"}],"usage":%b}' % usage
    )


TOKEN_EVENT = event(b'"choices":[{"index":0,"delta":{"content":" tok"},"finish_reason":null}]')


def last_events(usage: bytes) -> bytes:
    """How a stream ends."""
    stop = event(b'"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]')
    return stop + event(b'"choices":[],"usage":%b' % usage) + chunk(b"data: [DONE]\n\n") + LAST_CHUNK


ABOUT = sized(
    b'{"status":"ok","object":"list","data":[{"id":"mock","object":"model","owned_by":"mock"}],'
    b'"model_path":"mock","served_model_name":"mock","is_generation":true,"load":0}'
)
"""Answers every GET but /metrics: enough of OpenAI's, vLLM's and SGLang's routes for a healthy worker."""


NOT_FOUND = sized(b'{"error":{"message":"no such path"}}', status=b"404 Not Found")
BAD_REQUEST = sized(b'{"error":{"message":"not a chat request, or too long"}}', status=b"400 Bad Request")
_TOKENIZED_CHARACTERS = 256


def prompt_text(request: Any) -> str:
    """What a parsed request asks. Raises ``KeyError``, ``TypeError`` or ``AttributeError`` if it is none."""
    if "prompt" in request:
        return str(request["prompt"])
    return "".join([message["content"] for message in request["messages"]])


def _tokenized(body: bytes) -> bytes:
    """vLLM's ``/tokenize``, which vllm-router asks for its prefix tree; one id for 256 characters will do."""
    try:
        text = prompt_text(orjson.loads(body))
    except (ValueError, KeyError, TypeError, AttributeError):
        return BAD_REQUEST
    starts = range(0, len(text), _TOKENIZED_CHARACTERS)
    tokens = [hash(text[start : start + _TOKENIZED_CHARACTERS]) & 0x3FFFFFFF for start in starts]
    return sized(orjson.dumps({"tokens": tokens, "count": len(tokens), "max_model_len": 200_000}))


class ServerConnection(asyncio.Protocol):
    """One connection of a router's. Posts are told to ``posted``, its end to ``lost``."""

    def __init__(
        self,
        posted: Callable[["ServerConnection", bytes], None],
        lost: Callable[["ServerConnection"], None],
        metrics: Callable[[], bytes],
    ) -> None:
        self._posted = posted
        self._lost = lost
        self._metrics = metrics
        self._parser = httptools.HttpRequestParser(self)
        self._path = b""
        self._body: list[bytes] = []

    def write(self, data: bytes) -> None:
        """To the router."""
        self._transport.write(data)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self)

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
        body = b"".join(self._body)
        self._body.clear()
        if self._parser.get_method() == b"POST":
            if self._path.endswith(b"/tokenize"):
                self._transport.write(_tokenized(body))
            elif self._path.endswith(b"/render"):
                self._transport.write(NOT_FOUND)
            else:
                self._posted(self, body)
        elif self._path.startswith(b"/metrics"):
            self._transport.write(sized(self._metrics(), b"text/plain"))
        else:
            self._transport.write(ABOUT)
