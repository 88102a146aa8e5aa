"""Which paths clients may ask replicas for: the operator's ``allowed_paths`` and ``refused_paths``.

A path is looked at as the most lenient server would read it: decoded as often as it was encoded, whatever the
case of its letters, with slashes that stand together as one and the last one left out, as is white space
around a segment. A ``#`` is none of a path: some servers end it there (httptools), others do not.
"""

import re
from collections.abc import Iterable
from urllib.parse import unquote_to_bytes

MOST_PATH_BYTES = 4 * 1024
MOST_DECODINGS = 4
_SLASHES = re.compile(rb"[/\\]+")
_DOTS = frozenset({b".", b".."})


class PathRules:
    """One config's.

    >>> rules = PathRules((), ("/v1/load_lora_adapter", "DELETE /v1/files/*"))
    >>> [rules.refuse(b"POST", path) for path in (b"/v1/chat/completions", b"/v1//load%5Flora_adapter/")]
    [False, True]
    >>> rules.refuse(b"DELETE", b"/v1/files/a"), rules.refuse(b"GET", b"/v1/files/a")
    (True, False)
    >>> PathRules(("POST /v1/chat/completions",), ()).refuse(b"POST", b"/v1/completions")
    True
    """

    def __init__(self, allowed: Iterable[str], refused: Iterable[str]) -> None:
        self._allowed = [_pattern(one) for one in allowed]
        self._refused = [_pattern(one) for one in refused]

    def refuse(self, method: bytes, path: bytes) -> bool:
        """Whether a client may not send ``method`` and ``path`` to a replica."""
        if not (self._allowed or self._refused):
            return False
        plain = plain_path(path)
        if plain is None or not _DOTS.isdisjoint(plain.split(b"/")):
            return True  # where it leads is the replica's guess
        asked = (b"GET" if method == b"HEAD" else method) + b" " + plain
        allowed = not self._allowed or any(one.fullmatch(asked) for one in self._allowed)
        return not allowed or any(one.fullmatch(asked) for one in self._refused)


def plain_path(path: bytes) -> bytes | None:
    """``path`` without encoding, parameters, and slashes that say nothing; ``None``: it is no honest path.

    >>> plain_path(b"/v1//%2566iles/%20/a%20;b=c/"), plain_path(b"/v1/%" + b"25" * 9)
    (b'/v1/files/a', None)
    """
    if len(path) > MOST_PATH_BYTES or b"#" in path:
        return None
    for _ in range(MOST_DECODINGS):
        decoded = unquote_to_bytes(path)
        if decoded == path:
            segments = (one.partition(b";")[0].partition(b"\0")[0].strip() for one in _SLASHES.split(decoded))
            return b"/" + b"/".join(filter(None, segments))
        path = decoded
    return None


def _pattern(text: str) -> re.Pattern[bytes]:
    method, space, path = text.rpartition(" ")
    parts = (re.escape(part.encode()) for part in path.rstrip("/").split("*"))
    method_pattern = re.escape(("GET" if method == "HEAD" else method).encode()) if space else b"[^ ]*"
    return re.compile(method_pattern + b" " + b".*".join(parts), re.IGNORECASE | re.DOTALL)
