"""One answer on its way to the client: replica bytes -> client bytes, without I/O.

Bodies pass as they came. Only where the client's protocol has no word for the replica's framing are
they re-framed: chunks are taken apart for HTTP/1.0, and an answer that ends at the close becomes chunks.
"""

from typing import Final

from mypy_extensions import mypyc_attr

from router.proxy.body_framing import ChunkedBody, Framing, LengthBody, NoBody, UntilCloseBody
from router.proxy.cors import without_cors
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import RouterError
from router.proxy.stream_watch import JsonWatch, StreamWatch
from router.proxy.typed_stream import FORMS, TypedStreamWatch, stream_watch
from router.proxy.usage import usage_at_end
from router.routing.in_flight import Usage

MARKED_PATHS: Final = frozenset({b"/v1/chat/completions", b"/v1/completions", *FORMS})
"""Streams from there say that they are complete."""


@mypyc_attr(acyclic=True, free_list_len=1)
class Answer:
    """One answer. ``take`` what the replica sends; ``broken_off`` or ``closed`` when it stops."""

    __slots__ = (
        "_chunk_again",
        "_ends_marked",
        "_framing",
        "_head",
        "_path",
        "_payload",
        "_raw",
        "_watch",
        "_whole",
        "cut_short",
        "done",
        "first_token",
        "needs_close",
        "news",
        "reusable",
        "status",
        "until_close",
    )

    def __init__(self, head: ResponseHead, *, method: bytes, path: bytes, http10: bool) -> None:
        self._head = head
        self.status = head.status
        self.done = False
        self.cut_short = False
        """The framing was complete, but the stream in it was not: it has no mark of its end."""
        self.first_token = head.encoded
        """Content was seen; at once where it cannot be."""
        self.news = head.encoded
        """``done``, ``cut_short`` or ``first_token`` may have changed; whoever has looked clears it."""
        self._framing: Framing | None = None
        """None until it is needed, for a body with a length: most of those come in one piece."""
        self._payload: list[bytes] | None = None
        self._watch: StreamWatch | JsonWatch | None = None
        self._whole = b""
        self._raw = True
        self._chunk_again = False
        self._path = path
        self._ends_marked = head.event_stream and path in MARKED_PATHS
        self.until_close = False
        """The replica's close is the regular end."""
        self.reusable = head.keep_alive
        """The replica's connection may be used again."""
        self.needs_close = False
        """Only the close tells the client where the body ends."""
        if head.content_length == 0 or method == b"HEAD" or head.status in (204, 304):
            self._framing = NoBody()
        elif head.chunked:
            self._framing = ChunkedBody()
            self._raw = not http10
            self.needs_close = http10
            self._look_inside()
        elif head.content_length is None:
            self._framing = UntilCloseBody()
            self.until_close = True
            self.reusable = False
            self._raw = http10
            self._chunk_again = not http10
            self.needs_close = http10
            self._look_inside()

    def _look_inside(self) -> None:
        """Prepare to read the payload, where there is something to learn or to re-frame."""
        if self._readable:
            watch = self._watch = stream_watch(self._path) if self._head.event_stream else JsonWatch()
            self._payload = watch.pieces
        elif not self._raw:
            self._payload = []

    @property
    def _readable(self) -> bool:
        return 200 <= self.status < 300 and not self._head.encoded

    def head_bytes(
        self, *, http10: bool, keep_alive: bool, request_id: bytes, extra: bytes = b"", cors: bytes = b""
    ) -> bytes:
        """The head for the client. ``extra``: the router's own lines, each ended by CRLF.

        ``cors``: what it says of origins, instead of what the replica does.
        """
        head = self._head
        if self._chunk_again or (self._raw and isinstance(self._framing, ChunkedBody)):
            framing = b"transfer-encoding: chunked\r\n"
        else:
            framing = head.length_line
        if not keep_alive:
            framing += b"connection: close\r\n"
        elif http10:
            framing += b"connection: keep-alive\r\n"
        if head.event_stream:
            framing += b"x-accel-buffering: no\r\n"
        if cors:
            extra += cors
        opening = without_cors(head.opening) if cors else head.opening
        return b"%b%bx-request-id: %b\r\n%b\r\n" % (opening, framing, request_id, extra)

    def take_whole(self, data: bytes, start: int) -> bytes | None:
        """The body, if it has a length and ``data[start:]`` is exactly it; else None, and ``take`` it."""
        head = self._head
        if self._framing is not None or len(data) - start != head.content_length or head.event_stream:
            return None
        self.done = True
        body = self._whole = data[start:]
        return body

    def take(self, data: bytes, start: int = 0) -> bytes:
        """What the client gets for ``data[start:]``. Raises ``FramingError``."""
        framing = self._framing
        if framing is None:
            framing = self._framing = LengthBody(self._head.content_length or 0)
            self._look_inside()
        payload = self._payload
        if not self._raw:
            return self._take_and_reframe(framing, data, start)
        end = framing.take(data, start, payload)
        watch = self._watch
        if watch is not None:
            watch.grew(end - start)
            if watch.first_token is not self.first_token:
                self.first_token = self.news = True
        if framing.done:
            return data[start : self._last(framing, data, end)]
        return data[start:] if start else data

    def _take_and_reframe(self, framing: Framing, data: bytes, start: int) -> bytes:
        payload = self._payload
        assert payload is not None
        known = len(payload)
        end = framing.take(data, start, payload)
        body = b"".join(payload[known:])
        watch = self._watch
        if watch is None:
            payload.clear()
        else:
            watch.grew(end - start)
            if watch.first_token is not self.first_token:
                self.first_token = self.news = True
        if framing.done:
            self._last(framing, data, end)
        return b"%x\r\n%b\r\n" % (len(body), body) if body and self._chunk_again else body

    def _last(self, framing: Framing, data: bytes, end: int) -> int:
        """The answer's framing is complete with ``data[:end]``; returns where what may be passed on ends."""
        self.news = True
        if end != len(data):
            self.reusable = False  # bytes nobody asked for
        if self._lacks_end:
            self.cut_short = True
            if isinstance(framing, ChunkedBody):
                # Withhold the last chunk, or at least the last byte of it.
                end = framing.last_chunk_at if framing.last_chunk_at is not None else end - 1
        else:
            self.done = True
        return end

    @property
    def _lacks_end(self) -> bool:
        watch = self._watch
        return self._ends_marked and isinstance(watch, StreamWatch) and not watch.ended_properly

    def closed(self) -> bytes:
        """The replica closed in good order where that is the end (``until_close``)."""
        self.news = True
        if self._lacks_end:
            self.cut_short = True
            return b""
        self.done = True
        return b"0\r\n\r\n" if self._chunk_again else b""

    def broken_off(self, error: RouterError, request_id: str, detail: str) -> bytes:
        """The last bytes for a client whose answer will not be completed.

        An event stream gets an error event, if it stands between two events and a chunk may follow;
        an event that was cut cannot be taken back, and adding to it would garble both. After the stream's
        own last word there is nothing to add.
        """
        watch = self._watch
        if not isinstance(watch, StreamWatch) or not watch.between_events or watch.said_done:
            return b""
        if isinstance(watch, TypedStreamWatch) and watch.recognized:
            event = watch.form.error_event(error, error.text(request_id, detail), watch.tail)
        else:
            event = b"data: %b\n\n" % error.body(request_id, detail)
        if self._chunk_again:
            return b"%x\r\n%b\r\n" % (len(event), event)
        if not self._raw:
            return event
        framing = self._framing
        if isinstance(framing, ChunkedBody):
            if framing.at_boundary or (self.cut_short and framing.last_chunk_at is not None):
                return b"%x\r\n%b\r\n" % (len(event), event)
            return b""
        return event if isinstance(framing, UntilCloseBody) else b""

    def usage(self) -> Usage | None:
        """What the answer says about its tokens."""
        if self._whole:
            return usage_at_end(self._whole) if self._readable else None
        return self._watch.usage() if self._watch is not None else None
