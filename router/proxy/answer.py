"""One answer on its way to the client: replica bytes -> client bytes, without I/O.

Bodies pass as they came. Only where the client's protocol has no word for the replica's framing are
they re-framed: chunks are taken apart for HTTP/1.0, and an answer that ends at the close becomes chunks.
"""

from router.proxy.body_framing import ChunkedBody, Framing, LengthBody, NoBody, UntilCloseBody
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import RouterError
from router.proxy.stream_watch import JsonWatch, StreamWatch
from router.routing.in_flight import Usage

_DONE_PATHS = frozenset({b"/v1/chat/completions", b"/v1/completions"})
_NO_BODY_STATUSES = frozenset({204, 304})


class Answer:
    """One answer. ``take`` what the replica sends; ``broken_off`` or ``closed`` when it stops."""

    __slots__ = (
        "_chunk_again",
        "_framing",
        "_payload",
        "_raw",
        "_stream",
        "_watch",
        "cut_short",
        "done",
        "first_token",
        "needs_close",
        "reusable",
        "status",
    )

    def __init__(self, head: ResponseHead, *, method: bytes, path: bytes, http10: bool) -> None:
        self.status = head.status
        self.done = False
        self.cut_short = False
        """The framing was complete, but the stream in it was not: it has no mark of its end."""
        self.first_token = False
        self._framing: Framing
        no_body = method == b"HEAD" or head.status in _NO_BODY_STATUSES
        if no_body or head.content_length == 0:
            self._framing = NoBody()
        elif head.chunked:
            self._framing = ChunkedBody()
        elif head.content_length is not None:
            self._framing = LengthBody(head.content_length)
        else:
            self._framing = UntilCloseBody()
        until_close = isinstance(self._framing, UntilCloseBody)
        chunked = isinstance(self._framing, ChunkedBody)
        self.reusable = head.keep_alive and not until_close
        self._raw = not (http10 and chunked) and not (until_close and not http10)
        self._chunk_again = until_close and not http10
        self.needs_close = http10 and (chunked or until_close)
        """Only the close tells the client where the body ends."""
        self._watch: StreamWatch | JsonWatch | None = None
        self._stream: StreamWatch | None = None
        if 200 <= head.status < 300 and not no_body and not head.encoded:
            if head.event_stream:
                self._watch = self._stream = StreamWatch()
            else:
                self._watch = JsonWatch()
        elif head.encoded:
            self.first_token = True
        self._payload: list[bytes] | None = [] if self._watch is not None or not self._raw else None
        if self._stream is not None and path not in _DONE_PATHS:
            self._stream = None

    def head_bytes(self, head: ResponseHead, *, http10: bool, keep_alive: bool, extra: bytes) -> bytes:
        """The head for the client. ``extra``: the router's own lines, each ended by CRLF."""
        if self._chunk_again or (head.chunked and self._raw and not isinstance(self._framing, NoBody)):
            framing = b"transfer-encoding: chunked\r\n"
        elif head.content_length is not None and head.status != 204:
            framing = b"content-length: %d\r\n" % head.content_length
        else:
            framing = b""
        if not keep_alive:
            framing += b"connection: close\r\n"
        elif http10:
            framing += b"connection: keep-alive\r\n"
        if head.event_stream:
            framing += b"x-accel-buffering: no\r\n"
        kept = head.kept
        return b"HTTP/1.1 %d %b\r\n%b%b%b\r\n" % (
            head.status,
            head.reason,
            b"\r\n".join(kept) + b"\r\n" if kept else b"",
            framing,
            extra,
        )

    @property
    def until_close(self) -> bool:
        """The replica's close is the regular end."""
        return isinstance(self._framing, UntilCloseBody)

    def take(self, data: bytes, start: int = 0) -> bytes:
        """What the client gets for ``data[start:]``. Raises ``FramingError``."""
        framing = self._framing
        payload = self._payload
        end = framing.take(data, start, payload)
        if payload:
            self._look_at(payload)
        if framing.done:
            return self._last(data, start, end)
        if self._raw:
            if payload:
                payload.clear()
            return data[start:] if start else data
        return self._reframed()

    def _look_at(self, payload: list[bytes]) -> None:
        watch = self._watch
        if watch is not None:
            for piece in payload:
                watch.see(piece)
            if type(watch) is StreamWatch and watch.first_token:
                self.first_token = True

    def _last(self, data: bytes, start: int, end: int) -> bytes:
        """The answer's framing is complete with ``data[:end]``."""
        if end != len(data):
            self.reusable = False  # bytes nobody asked for
        framing = self._framing
        if self._stream is not None and not self._stream.ended_properly:
            self.cut_short = True
            if isinstance(framing, ChunkedBody):
                # Withhold the last chunk, or at least the last byte of it.
                end = framing.last_chunk_at if framing.last_chunk_at is not None else end - 1
        else:
            self.done = True
        if self._raw:
            return data[start:end]
        return self._reframed()

    def _reframed(self) -> bytes:
        payload = self._payload
        assert payload is not None
        body = b"".join(payload)
        payload.clear()
        if not body:
            return b""
        return b"%x\r\n%b\r\n" % (len(body), body) if self._chunk_again else body

    def closed(self) -> bytes:
        """The replica closed in good order where that is the end (``until_close``)."""
        if self._stream is not None and not self._stream.ended_properly:
            self.cut_short = True
            return b""
        self.done = True
        return b"0\r\n\r\n" if self._chunk_again else b""

    def broken_off(self, error: RouterError, request_id: str, detail: str) -> bytes:
        """The last bytes for a client whose answer will not be completed.

        An event stream gets an error event, if it stands between two events and a chunk may follow;
        an event that was cut cannot be taken back, and adding to it would garble both.
        """
        watch = self._watch
        if not isinstance(watch, StreamWatch) or not watch.between_events:
            return b""
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
        return self._watch.usage() if self._watch is not None else None
