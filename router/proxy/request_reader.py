"""Bytes from one client, cut anywhere -> whole requests, one at a time."""

from enum import Enum, auto
from typing import TYPE_CHECKING, Final

from httptools import HttpRequestParser

from router.proxy.body_framing import ChunkedBody, Framing, FramingError, LengthBody
from router.proxy.request_head import ClientError, RequestHead, check_partial_head, read_request_head
from router.proxy.router_error import BAD_REQUEST, BODY_TOO_LARGE, HEADERS_TOO_LARGE

if TYPE_CHECKING:
    from mypy_extensions import i64  # compiled, a number of 64 bits in a register; else an int like any other

MAX_LENGTH_DIGITS: Final = 15
MOST_KNOWN_HEAD_BYTES: Final = 8 * 1024
"""A longer head is judged anew each time: thousands of idle clients must not have theirs kept."""
MOST_CHUNKED_BYTES: Final = 32 * 1024
"""Of a chunked body, read at once: chunks of a few bytes cost a microsecond each."""
SMALL_PIECE_BYTES: Final = 4 * 1024
"""Smaller pieces of a body are put together as they come: each would take ten times its size."""
LONG_PIECE_BYTES: Final = 16 * 1024
"""So much of a body that came with its head is copied only once, when all of it is here."""


class Expecting(Enum):
    """What the client's next bytes are."""

    REQUEST = auto()
    """A new request: nothing of one has come."""
    HEAD = auto()
    """More of a head."""
    BODY = auto()
    """More of a body."""


class KnownHead:
    """A head that was judged, and its bytes before and after the digits of its length.

    A client's next head is mostly the same but for those, and need not be judged again.
    """

    __slots__ = ("after", "before", "head")

    def __init__(self, head: RequestHead, before: bytes, after: bytes | None) -> None:
        self.head = head
        self.before = before
        self.after = after
        """None: it has no length, and ``before`` is all of it."""


class LastHead:
    """The head that was judged last, of any connection: a new one's first is often the same."""

    __slots__ = ("known",)

    def __init__(self) -> None:
        self.known: KnownHead | None = None


class RequestReader:
    """Holds what one client sent and was not served yet. After a ``ClientError`` it must not be used again.

    >>> reader = RequestReader()
    >>> reader.feed(b"POST /v1/a HTTP/1.1\\r\\nHost: h\\r\\nContent-Length: 2\\r\\n\\r\\n{}GET /hea")
    >>> head, body = reader.next_request(header_limit=1024, body_limit=1024)
    >>> head.target, body, reader.next_request(header_limit=1024, body_limit=1024), reader.expecting
    (b'/v1/a', b'{}', None, <Expecting.HEAD: 2>)
    """

    __slots__ = (
        "_body",
        "_fed",
        "_first",
        "_head",
        "_known",
        "_last",
        "_length",
        "_partial",
        "_payload",
        "_payload_bytes",
        "_start",
        "buffer",
        "expecting",
        "turn_over",
        "wants_continue",
    )

    def __init__(self, last: LastHead | None = None) -> None:
        """``last``: shared by connections whose heads may be read by the same rules."""
        self.buffer = b""
        """Not read yet."""
        self.expecting = Expecting.REQUEST
        self.wants_continue = False
        """The client waits for ``100 Continue``; whoever writes it clears this."""
        self.turn_over = False
        """``next_request`` found no whole request, but has not looked at all of the buffer."""
        self._head: RequestHead | None = None
        self._length = 0
        """Bytes of the body of the head that was read last, where it has a length."""
        self._start = 0
        """Where in the buffer that body begins."""
        self._body: Framing | None = None
        self._first: bytes | memoryview = b""
        """What came of a long body with its head."""
        self._payload: list[bytes] = []
        """What came of it after that."""
        self._payload_bytes = 0
        self._partial: HttpRequestParser | None = None
        self._fed = 0
        """Bytes at the buffer's beginning that ``_partial`` has judged."""
        self._last = last
        self._known: KnownHead | None = None if last is None else last.known

    @property
    def head(self) -> RequestHead:
        """The head of the request whose body is expected."""
        assert self._head is not None
        return self._head

    @property
    def receiving(self) -> int:
        """Bytes that are here of a body that is not whole yet."""
        return self._payload_bytes if self._body is not None else 0

    def feed(self, data: bytes) -> None:
        """More bytes came."""
        buffer = self.buffer
        self.buffer = buffer + data if buffer else data

    def next_request(self, *, header_limit: int, body_limit: int) -> tuple[RequestHead, bytes] | None:
        """The next request with its whole body, or None if more bytes are needed. Raises ``ClientError``."""
        head = self._head
        if head is not None:
            return self._read_body(head, body_limit)
        head = self._read_known_head(header_limit) or self._read_head(header_limit)
        if head is None:
            return None
        length, start = self._length, self._start
        if head.chunked:
            self.buffer = self.buffer[start:]
            self._begin_body(head, ChunkedBody())
            return self._read_body(head, body_limit)
        if length > body_limit:
            raise ClientError(BODY_TOO_LARGE.at(body_limit))
        buffer = self.buffer
        end = start + length
        here = len(buffer)
        if here >= end:  # all here: the usual case
            self.buffer = buffer[end:]
            self.expecting = Expecting.REQUEST
            return head, buffer[start:end]
        if here - start < LONG_PIECE_BYTES:
            self.buffer = buffer[start:]
            self._begin_body(head, LengthBody(length))
            return self._read_body(head, body_limit)
        self.buffer = b""
        self._begin_body(head, LengthBody(end - here))
        self._first = memoryview(buffer)[start:]
        self._payload_bytes = here - start
        self.wants_continue = False
        return None

    def _read_known_head(self, limit: int) -> RequestHead | None:
        """The head, if it is the last one again with perhaps another length; else as ``_read_head``."""
        known, buffer = self._known, self.buffer
        if known is None or self._fed:
            return None
        before, after = known.before, known.after
        start: i64 = len(before)
        if not buffer.startswith(before) or start > limit:
            return None
        if after is None:
            self._length, self._start = 0, start
            return known.head
        length: i64 = 0
        end: i64 = start
        most: i64 = min(len(buffer), start + MAX_LENGTH_DIGITS)
        while end < most:
            byte: i64 = buffer[end]
            if not 0x30 <= byte <= 0x39:
                break
            length = 10 * length + byte - 0x30
            end += 1
        stop: i64 = end + len(after)
        if end == start or buffer[end:stop] != after or stop > limit:
            return None
        self._length, self._start = length, stop
        return known.head

    def _read_head(self, limit: int) -> RequestHead | None:
        """The head, with ``_length`` and ``_start`` of its body; None if more is needed."""
        if not self._fed and self.buffer.startswith(b"\r\n"):
            self._skip_blank_lines()
        buffer = self.buffer
        end = buffer.find(b"\r\n\r\n", 0, limit) + 4
        if end < 4:
            if len(buffer) >= limit:
                raise ClientError(HEADERS_TOO_LARGE.at(limit))
            if buffer and buffer != b"\r":  # half a blank line
                self._judge_partial(buffer)
            return None
        self._partial = None
        self._fed = 0
        raw = buffer[:end]
        head, length = read_request_head(raw)
        self._known = known_head(raw, head, length)
        if self._last is not None:
            self._last.known = self._known
        self._length, self._start = length, end
        return head

    def _skip_blank_lines(self) -> None:
        """RFC 9112, 2.2: some clients end a body so."""
        buffer = self.buffer
        pairs = (len(buffer) - len(buffer.lstrip(b"\r\n"))) // 2
        if buffer.startswith(b"\r\n" * pairs):  # else it is no blank line, and refused
            self.buffer = buffer[2 * pairs :]

    def _judge_partial(self, buffer: bytes) -> None:
        """Refuse at once what cannot become a head."""
        if self._partial is None:
            self._partial = HttpRequestParser(None)
        check_partial_head(self._partial, buffer[self._fed :])
        self._fed = len(buffer)
        self.expecting = Expecting.HEAD

    def _begin_body(self, head: RequestHead, body: Framing) -> None:
        self._head = head
        self._body = body
        self._first = b""
        self._payload = []
        self._payload_bytes = 0
        self.wants_continue = head.expects_continue and not self.buffer
        self.expecting = Expecting.BODY

    def _read_body(self, head: RequestHead, limit: int) -> tuple[RequestHead, bytes] | None:
        body, buffer = self._body, self.buffer
        assert body is not None
        now = buffer[:MOST_CHUNKED_BYTES] if head.chunked else buffer
        pieces: list[bytes] = []
        try:
            end = body.take(now, 0, pieces)
        except FramingError:
            raise ClientError(BAD_REQUEST) from None
        self.buffer = buffer[end:]
        self._collect(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if self._payload_bytes > limit:
            raise ClientError(BODY_TOO_LARGE.at(limit))
        self.turn_over = not body.done and len(self.buffer) > 0
        if not body.done:
            return None
        whole = b"".join((self._first, *self._payload))
        self._head = self._body = None
        self._first = b""
        self._payload = []
        self.wants_continue = False
        self.expecting = Expecting.REQUEST
        return head, whole

    def _collect(self, piece: bytes) -> None:
        payload = self._payload
        self._payload_bytes += len(piece)
        if payload and len(piece) < SMALL_PIECE_BYTES and len(payload[-1]) < SMALL_PIECE_BYTES:
            payload[-1] += piece
        else:
            payload.append(piece)


def known_head(raw: bytes, head: RequestHead, length: int) -> KnownHead | None:
    """``head``, read from ``raw`` with a body of ``length`` bytes, to be known again if it can be."""
    if len(raw) > MOST_KNOWN_HEAD_BYTES:
        return None
    name = raw.lower().find(b"\r\ncontent-length:")
    if name < 0:
        return KnownHead(head, raw, None)
    digits = b"%d" % length
    end = raw.find(b"\r", name + 2)
    start = raw.find(digits, name, end)
    if start < 0 or start + len(digits) != end:
        return None  # leading zeros, spaces: lawful and rare
    return KnownHead(head, raw[:start], raw[end:])
