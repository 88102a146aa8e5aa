"""What fields a form (``multipart/form-data``) sets: looked for wherever a server might read one."""

import re
from collections.abc import Collection
from typing import Final

from router.proxy.request_head import RequestHead

MOST_PARTS: Final = 1_000
PART_HEAD_BYTES: Final = 8 * 1024
_CONTENT_TYPE: Final = b"content-type:"
_KIND: Final = b"multipart/form-data"
_BOUNDARY: Final = re.compile(rb";[ \t]*boundary=(\"?)([\w'()+,./:=?-]{1,70})\1[ \t]*(?:;|$)", re.IGNORECASE)
_NAME: Final = re.compile(
    rb"[;\s]name(\*[^=;]*)?\s*=\s*(?:\"((?:[^\"\\]|\\.)*)\"|([^;\s]*))", re.IGNORECASE | re.DOTALL
)


def content_types(head: RequestHead) -> list[bytes]:
    """What ``head`` says of the body, as it was written."""
    size = len(_CONTENT_TYPE)
    return [line[size:].strip() for line in head.kept if line[:size].lower() == _CONTENT_TYPE]


def is_form(kinds: list[bytes]) -> bool:
    """One content type, and it is a form's."""
    return len(kinds) == 1 and kinds[0].lower().startswith(_KIND)


def set_in_form(kinds: list[bytes], body: bytes, names: Collection[str]) -> str | None:
    r"""The first of ``names`` that a form sets; "" if it cannot be told; ``None`` if none, or it is no form.

    ``kinds``: the body's content types. Refused as "" is what servers read differently: several content types
    or boundaries, names in RFC 2231's encoding, heads of parts over 8 KiB, over 1,000 parts.

    >>> part = b'--B\r\nContent-Disposition: form-data; name="priority"\r\n\r\n-9\r\n--B--'
    >>> form = [b"multipart/form-data; boundary=B"]
    >>> set_in_form(form, part, {"priority"}), set_in_form(form, part, {"cache_salt"})
    ('priority', None)
    >>> set_in_form(form, part.replace(b"name=", b"name*="), {"cache_salt"})
    ''
    """
    if not any(kind.lower().startswith(_KIND) for kind in kinds):
        return None
    kind = kinds[0]
    boundary = _BOUNDARY.search(kind)
    if len(kinds) > 1 or boundary is None or kind.lower().count(b"boundary") > 1:
        return ""
    mark = b"--" + boundary[2]
    if body.count(mark) > MOST_PARTS:
        return ""
    start = body.find(mark)
    while start >= 0:
        start += len(mark)
        following = body.find(mark, start)
        stop = len(body) if following < 0 else following
        end = body.find(b"\r\n\r\n", start, stop)
        if end < 0:
            end = stop
        if end - start > PART_HEAD_BYTES:
            return ""
        for star, quoted, bare in _NAME.findall(body[start:end]):
            name: str = (quoted or bare).replace(b"\\", b"").strip(b'" ').decode("latin-1")
            if star:
                return ""
            if name in names:
                return name
        start = following
    return None
