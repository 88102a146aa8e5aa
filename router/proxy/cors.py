"""Cross-origin requests from browsers: preflights are answered here; answers say whose pages may read them.

A preflight carries no key (the Fetch standard has it so), and asks nothing of a replica. Replicas never see
``Origin`` where this is on, and what they say of it all the same is not passed on.
"""

from router.config import RouterConfig
from router.proxy.request_head import RequestHead
from router.proxy.router_error import ORIGIN_NOT_ALLOWED, error_answer

_METHODS = b"GET, POST, PUT, PATCH, DELETE, HEAD"
_EXPOSED = b"retry-after, x-request-id, x-warmroute-matched-tokens, x-warmroute-reason, x-warmroute-replica"


class Cors:
    """Which origins are allowed."""

    __slots__ = ("_any", "_max_age_s", "_origins")

    def __init__(self, origins: frozenset[bytes], max_age_s: int) -> None:
        self._any = b"*" in origins
        self._origins = origins
        self._max_age_s = max_age_s

    def lines(self, head: RequestHead) -> bytes:
        """What an answer's head says of it, each line ended by CRLF."""
        allowed = self._allowed(head)
        if allowed is None:
            return b"" if self._any else b"vary: Origin\r\n"
        return b"%baccess-control-allow-origin: %b\r\naccess-control-expose-headers: %b\r\n" % (
            b"" if self._any else b"vary: Origin\r\n",
            allowed,
            _EXPOSED,
        )

    def preflight(self, head: RequestHead, request_id: bytes, *, keep_alive: bool) -> bytes:
        """The whole answer to a preflight."""
        lines = self.lines(head)
        if self._allowed(head) is None:
            return error_answer(ORIGIN_NOT_ALLOWED, request_id.decode(), keep_alive=keep_alive, cors=lines)
        wanted = header(head, b"access-control-request-headers")
        return b"".join(
            (
                b"HTTP/1.1 204 No Content\r\n",
                lines,
                b"access-control-allow-methods: %b\r\n" % _METHODS,
                b"access-control-allow-headers: %b\r\n" % wanted if wanted else b"",
                b"access-control-max-age: %d\r\nx-request-id: %b\r\n" % (self._max_age_s, request_id),
                b"connection: keep-alive\r\n\r\n" if keep_alive else b"connection: close\r\n\r\n",
            )
        )

    def _allowed(self, head: RequestHead) -> bytes | None:
        origin = header(head, b"origin")
        if origin is None:
            return None
        if self._any:
            return b"*"
        return origin if origin in self._origins else None


def cors_of(config: RouterConfig) -> Cors | None:
    """What ``config`` wants; ``None``: replicas answer for themselves."""
    cors = config.cors
    origins = cors.origins
    if origins is None:
        origins = ("*",) if config.keys.public or config.tenants is not None else ()
    return Cors(frozenset(origin.encode() for origin in origins), cors.max_age_s) if origins else None


def is_preflight(head: RequestHead) -> bool:
    """Whether a browser asks what it may send."""
    return (
        head.method == b"OPTIONS"
        and header(head, b"origin") is not None
        and header(head, b"access-control-request-method") is not None
    )


def header(head: RequestHead, name: bytes) -> bytes | None:
    """The value of the header ``name``, in lower case, if it came once; not one that the router reads."""
    mark = name + b":"
    values = [line[len(mark) :].strip(b" \t") for line in head.kept if line[: len(mark)].lower() == mark]
    return values[0] if len(values) == 1 else None


def without_cors(opening: bytes) -> bytes:
    r"""A replica's answer, its status line and headers, without what it says of origins.

    >>> without_cors(b"HTTP/1.1 200 OK\r\nAccess-Control-Allow-Origin: *\r\na: b\r\n")
    b'HTTP/1.1 200 OK\r\na: b\r\n'
    """
    lines = opening.split(b"\r\n")
    return b"\r\n".join([line for line in lines if line[:15].lower() != b"access-control-"])


def without_origin(lines: list[bytes]) -> list[bytes]:
    """Header ``lines`` as a replica gets them."""
    return [line for line in lines if line[:7].lower() != b"origin:"]
