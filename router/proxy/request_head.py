"""A request's head: bytes from the client -> what the router must know, and the bytes a replica gets.

llhttp (through httptools) judges the whole head strictly: bare LF, folded lines, NUL, spaces before the
colon, repeated or conflicting lengths are refused. What it accepted is cut at CRLF; header lines that are
not the router's business are passed on byte for byte.
"""

import re
from typing import Final

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser

from router.proxy.router_error import BAD_REQUEST, NOT_IMPLEMENTED, VERSION, RouterError

MAX_ID_CHARS = 128
MAX_SESSION_CHARS = 256
MAX_LENGTH_DIGITS: Final = 20
"""As many as 64 bits have."""

STEERING_HEADERS = frozenset(
    {
        b"x-data-parallel-host-port",
        b"x-data-parallel-rank",
        b"x-encoder-hosts-ports",
        b"x-kv-cache-source-host-port",
        b"x-llm-d-data-parallel-host-port",
        b"x-llm-d-encoder-hosts-ports",
        b"x-llm-d-kv-cache-source-host-port",
        b"x-llm-d-prefiller-host-port",
        b"x-override-bootstrap-host",
        b"x-override-bootstrap-port",
        b"x-override-bootstrap-room",
        b"x-override-conversation-id",
        b"x-override-disagg-prefill-dp-rank",
        b"x-override-priority",
        b"x-override-rid",
        b"x-override-routed-dp-rank",
        b"x-prefiller-host-port",
        b"x-vllm-priority",
        b"x-warmroute-kv-source",
    }
)
"""What tells an engine, or the sidecar before it, who computes, where KV is and who goes first: never a
client's to say. ``x-override-*`` are SGLang's (``SGLANG_ENABLE_REQUEST_HEADER_OVERRIDES``), which put them in
the place of the body's fields, as vLLM does with its priority."""
COMPRESSED = b"x-body-compressed"
"""SGLang unpacks such a body (``SGLANG_ENABLE_REQUEST_DECOMPRESSION``), which nobody has looked into."""
# Lines that are not passed on as they are: hop-by-hop, made anew, or read by the router.
READ_HEADERS = STEERING_HEADERS | frozenset(
    {
        b"accept-encoding",
        b"api-key",
        b"authorization",
        b"connection",
        b"content-length",
        b"endpoint-load-metrics-format",  # asks vLLM to tell its load and cache use in the answer's head
        b"expect",
        b"host",
        b"http2-settings",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"x-api-key",
        b"x-body-compressed",
        b"x-forwarded-for",
        b"x-forwarded-proto",
        b"x-request-id",
        b"x-session-id",
        b"x-warmroute-policy",
    }
)
CLIENT_KEYS = (b"authorization", b"api-key", b"x-api-key")
BODILESS: Final = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS"})
"""Methods whose requests mostly have no body: without one they need not tell its length."""
_FRAMING = frozenset({b"content-length", b"host", b"transfer-encoding"})
"""Never hop-by-hop, whatever Connection says."""
_HOST = re.compile(rb"(?:\[[0-9A-Za-z:.%_~-]+\]|[0-9A-Za-z\-._~%!$&'()*+;=]*)(?::[0-9]*)?").fullmatch
"""RFC 3986, 3.2.2, but for the comma, which is how a second Host shows; empty is allowed."""
_INVISIBLE = bytes(byte for byte in range(256) if not 0x21 <= byte <= 0x7E)


class ClientError(Exception):
    """The client's request cannot be served; ``error`` is what it is told."""

    def __init__(self, error: RouterError) -> None:
        super().__init__(error.message)
        self.error = error


class RequestHead:
    """One request's head, not its length: heads of one client are mostly the same but for that. Immutable."""

    __slots__ = (
        "chunked",
        "expects_continue",
        "found",
        "http10",
        "keep_alive",
        "kept",
        "method",
        "path",
        "policy",
        "request_id",
        "session",
        "target",
    )

    def __init__(
        self, method: bytes, target: bytes, http10: bool, found: dict[bytes, bytes], kept: list[bytes]
    ) -> None:
        keep_alive, nominated = _read_connection(found.get(b"connection"), http10)
        if nominated:
            kept = [line for line in kept if line[: line.find(b":")].lower() not in nominated]
            found = {name: value for name, value in found.items() if name not in nominated}
        self.method = method
        self.target = target
        """As the client sent it, byte for byte; of an absolute target, the part after the authority."""
        self.path = target.partition(b"?")[0]
        self.http10 = http10
        self.keep_alive = keep_alive
        self.chunked = b"transfer-encoding" in found
        self.found = found
        """The lines that the router reads, by name; those given twice joined by a comma."""
        self.kept = kept
        """All other lines, as they came."""
        self.expects_continue = not http10 and found.get(b"expect", b"").lower() == b"100-continue"
        session = found.get(b"x-session-id")
        self.session = session[:MAX_SESSION_CHARS].decode("latin-1") if session else None
        policy = found.get(b"x-warmroute-policy")
        self.policy = policy.decode("latin-1") if policy else None
        """The kind of policy the client asks for."""
        given = found.get(b"x-request-id", b"")
        self.request_id = given.translate(None, _INVISIBLE)[:MAX_ID_CHARS]
        """The client's ``x-request-id`` cut down to 128 visible ASCII characters; may be empty."""


def read_request_head(head: bytes) -> tuple[RequestHead, int]:
    r"""The request in ``head``, which ends with the empty line, and its body's bytes. Raises ``ClientError``.

    >>> lines = b"POST /v1/x?a=%2F HTTP/1.1", b"Host: a", b"Content-Length: 2", b"X-A: b", b"", b""
    >>> head, body_bytes = read_request_head(b"\r\n".join(lines))
    >>> head.method, head.target, head.keep_alive, head.kept, body_bytes
    (b'POST', b'/v1/x?a=%2F', True, [b'X-A: b'], 2)
    """
    parser = HttpRequestParser(None)
    try:
        parser.feed_data(head)
    except HttpParserUpgrade:
        pass  # an Upgrade header asks, it does not oblige: it is dropped
    except HttpParserError:
        raise ClientError(BAD_REQUEST) from None
    lines = head.split(b"\r\n")
    parts = lines[0].split(b" ")
    if len(parts) != 3 or parts[0] != parser.get_method():
        raise ClientError(BAD_REQUEST)
    method, target, version = parts
    if version not in (b"HTTP/1.1", b"HTTP/1.0"):
        raise ClientError(VERSION if version.startswith(b"HTTP/") else BAD_REQUEST)
    if method == b"CONNECT":
        raise ClientError(NOT_IMPLEMENTED)
    found: dict[bytes, bytes] = {}
    kept: list[bytes] = []
    for line in lines[1:-2]:
        colon = line.find(b":")
        name = line[:colon].lower()
        if name in READ_HEADERS:
            value = line[colon + 1 :].strip(b" \t")
            found[name] = found[name] + b", " + value if name in found else value
        else:
            kept.append(line)
    if target[:1] != b"/":
        target = _origin_form(target)
    http10 = version == b"HTTP/1.0"
    _check_host(found.get(b"host"), http10)
    body_bytes = _read_framing(found, http10)
    return RequestHead(method, target, http10, found, kept), body_bytes


def check_partial_head(parser: HttpRequestParser, data: bytes) -> None:
    """Feed the next piece of an incomplete head; raises ``ClientError`` once it cannot be HTTP."""
    try:
        parser.feed_data(data)
    except HttpParserUpgrade:
        pass
    except HttpParserError:
        raise ClientError(BAD_REQUEST) from None


def _origin_form(target: bytes) -> bytes:
    """``http://host/path`` -> ``/path``; ``*`` stays and is nobody's path."""
    scheme, separator, rest = target.partition(b"://")
    if not separator or scheme.lower() not in (b"http", b"https"):
        return target
    authority = min((at for at in (rest.find(b"/"), rest.find(b"?")) if at >= 0), default=len(rest))
    path = rest[authority:]
    return path if path.startswith(b"/") else b"/" + path


def _check_host(host: bytes | None, http10: bool) -> None:
    if host is None:
        if not http10:
            raise ClientError(BAD_REQUEST)
    elif not _HOST(host):  # twice, or not a host
        raise ClientError(BAD_REQUEST)


def _read_framing(found: dict[bytes, bytes], http10: bool) -> int:
    """RFC 9112, 6.3. llhttp has refused a length beside an encoding, and a length given twice."""
    length = found.get(b"content-length")
    coding = found.get(b"transfer-encoding")
    if coding is not None and (http10 or length is not None or coding.lower() != b"chunked"):
        raise ClientError(BAD_REQUEST)
    if length is None:
        return 0
    if not length.isdigit() or len(length) > MAX_LENGTH_DIGITS:
        raise ClientError(BAD_REQUEST)
    return int(length)


def _read_connection(connection: bytes | None, http10: bool) -> tuple[bool, set[bytes]]:
    """Keep-alive, and the names of header lines that are meant for this hop only."""
    if connection is None:
        return not http10, set()
    tokens = {token.strip() for token in connection.lower().split(b",")}
    keep_alive = b"close" not in tokens and (not http10 or b"keep-alive" in tokens)
    return keep_alive, tokens - {b"close", b"keep-alive", b""} - _FRAMING


class ForwardedAs:
    """What every head that is forwarded from one connection has in common: its peer and its scheme."""

    __slots__ = ("_hop", "_peer", "_scheme")

    def __init__(self, peer: bytes, scheme: bytes, hop: bytes) -> None:
        """``hop``: who forwards it, in ``Via``."""
        self._peer = peer
        self._scheme = scheme
        self._hop = hop

    def lines(self, request: RequestHead, kept: list[bytes]) -> bytes:
        """The lines that a replica gets after Host and keys and before the request's id and length.

        ``kept``: those of ``request.kept`` that it gets as they came.
        """
        found = request.found
        peer = found.get(b"x-forwarded-for")
        if peer is None:
            peer = self._peer
        elif self._peer:
            peer = peer + b", " + self._peer
        return b"%bvia: %b %b\r\naccept-encoding: identity\r\n%b%bx-forwarded-proto: %b\r\n" % (
            b"\r\n".join(kept) + b"\r\n" if kept else b"",
            b"1.0" if request.http10 else b"1.1",
            self._hop,
            b"x-forwarded-for: %b\r\n" % peer if peer else b"",
            b"x-session-id: %b\r\n" % found[b"x-session-id"] if b"x-session-id" in found else b"",
            found.get(b"x-forwarded-proto", self._scheme),
        )


def client_keys(request: RequestHead) -> bytes:
    """The lines that hold the client's own keys, for replicas that may see them."""
    found = request.found
    return b"".join(b"%b: %b\r\n" % (name, found[name]) for name in CLIENT_KEYS if name in found)


def has_dot_segments(path: bytes) -> bool:
    """Whether a server behind us might resolve ``path`` to one outside ``/v1/``.

    >>> paths = b"/v1/a..b", b"/v1/../x", b"/v1/%2E%2e/x", b"/v1/a/.", b"/v1/..;a=b/x"
    >>> [has_dot_segments(path) for path in paths]
    [False, True, True, True, True]
    """
    if path.find(b".") < 0 and path.find(b"%2") < 0:
        return False
    plain = (
        path.lower().replace(b"%2e", b".").replace(b"%2f", b"/").replace(b"%5c", b"/").replace(b"\\", b"/")
    )
    return any(segment.partition(b";")[0] in (b".", b"..") for segment in plain.split(b"/"))
