"""A replica's answer, its head: bytes -> status, framing, and the header lines the client gets.

llhttp judges the head strictly; hop-by-hop lines are dropped, all others are passed on byte for byte.
"""

from httptools import HttpParserError, HttpParserUpgrade, HttpResponseParser

from router.proxy.request_head import MAX_LENGTH_DIGITS

_READ = frozenset(
    {
        b"connection",
        b"content-length",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-accel-buffering",
        b"x-request-id",
    }
)


class GarbageError(Exception):
    """What the replica sent is not an HTTP/1 answer."""


class ResponseHead:
    """The head of a replica's answer. Not changed once it is read."""

    __slots__ = (
        "chunked",
        "content_length",
        "encoded",
        "event_stream",
        "keep_alive",
        "length_line",
        "opening",
        "retry_after",
        "size",
        "status",
    )

    def __init__(self, status: int) -> None:
        self.status = status
        self.opening = b""
        """Status line and the lines that are passed on, as the client gets them."""
        self.size = 0
        """Bytes of the head itself."""
        self.content_length: int | None = None
        self.length_line = b""
        """What says so to the client; empty where there is none."""
        self.chunked = False
        self.keep_alive = True
        """The connection may serve another request after this answer."""
        self.event_stream = False
        self.encoded = False
        """The body is compressed: its bytes say nothing to us."""
        self.retry_after: bytes | None = None
        """What ``Retry-After`` says."""


def read_response_head(head: bytes) -> ResponseHead:
    r"""The answer in ``head``, which ends with the empty line. Raises ``GarbageError``.

    >>> head = read_response_head(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Type: a/b\r\n\r\n")
    >>> head.status, head.content_length, head.opening
    (200, 2, b'HTTP/1.1 200 OK\r\nContent-Type: a/b\r\n')
    """
    parser = HttpResponseParser(None)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        raise GarbageError("upgrade") from None
    except HttpParserError as error:
        raise GarbageError(str(error)) from None
    status = parser.get_status_code()
    lines = head.split(b"\r\n")
    first = lines[0]
    version = first[:8]
    if version not in (b"HTTP/1.1", b"HTTP/1.0") or status < 100 or b"\0" in first:
        raise GarbageError("status line")
    answer = ResponseHead(status)
    answer.size = len(head)
    kept: list[bytes] = []
    connection = coding = None
    for line in lines[1:-2]:
        colon = line.find(b":")
        name = line[:colon].lower()
        if name not in _READ:
            kept.append(line)
            if name == b"content-type":
                answer.event_stream = line[colon + 1 :].lstrip(b" \t")[:17].lower() == b"text/event-stream"
            elif name == b"content-encoding":
                answer.encoded = line[colon + 1 :].strip(b" \t").lower() not in (b"identity", b"")
            elif name == b"retry-after":
                answer.retry_after = line[colon + 1 :].strip(b" \t")
            continue
        value = line[colon + 1 :].strip(b" \t").lower()
        if name == b"content-length":
            if not value.isdigit() or len(value) > MAX_LENGTH_DIGITS:
                raise GarbageError("content-length")
            answer.content_length = int(value)
            if status != 204:
                answer.length_line = b"content-length: %d\r\n" % answer.content_length
        elif name == b"transfer-encoding":
            coding = value if coding is None else coding + b", " + value
        elif name == b"connection":
            connection = value if connection is None else connection + b", " + value
    if coding is not None:
        if coding != b"chunked" or answer.content_length is not None or version == b"HTTP/1.0":
            raise GarbageError("transfer-encoding")
        answer.chunked = True
    if version == b"HTTP/1.0":
        answer.keep_alive = connection is not None and b"keep-alive" in connection
    if connection is not None and connection != b"keep-alive":
        tokens = {token.strip() for token in connection.split(b",")}
        if b"close" in tokens:
            answer.keep_alive = False
        kept = [line for line in kept if line[: line.find(b":")].lower() not in tokens]
    answer.opening = b"HTTP/1.1 %d %b\r\n%b" % (
        status,
        first[13:],
        b"\r\n".join(kept) + b"\r\n" if kept else b"",
    )
    return answer
