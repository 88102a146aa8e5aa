"""How a JSON body is read so that it does not hold the event loop: told by how many values it has.

A long text is one value and quickly parsed, however long. Nineteen million empty lists in 57 MB took 3.5 s.
"""

from collections.abc import Callable
from typing import Any, Final

from router.routing.flat_request import marks, marks_in_texts, read_fields, request_of, whole_request

Parser = Callable[[bytes], dict[str, Any] | None]
"""Reads the body that it was made for; ``None``: it is no JSON object."""

CHECK_FROM_BYTES: Final = 64 * 1024
"""Shorter bodies cannot hold the loop for long, whatever is in them."""
FLAT_MARKS: Final = 60_000
"""Bodies of more marks outside texts (``marks``) are read flat: objects of them take 5 ms in plain Python."""
MOST_TEXT_MARKS: Final = 1.0 / 3.0
"""More of a body's bytes are marks only where most of it is no text."""
REFUSE_FROM_BYTES: Final = 1024 * 1024
MOST_STRINGS: Final = 100_000
MOST_LISTS: Final = 100_000
"""Objects are counted as lists."""
MOST_COMMAS: Final = 1_500_000
"""A prompt of a million token ids has a million."""

_STRIDES: Final = (113, 127, 131, 137, 139, 149, 151, 157)
_stride: Final = _STRIDES[hash(b"stride") % len(_STRIDES)]
"""Python hashes bytes differently in each process: no sender knows which of its bytes are looked at."""
LOOK_CLOSER: Final = 0.7 * FLAT_MARKS


def marks_of(body: bytes) -> int | None:
    """How many marks ``body`` has, in texts and outside; ``None``: it has more strings, lists or values than
    any request needs. What is inside strings does not count there. Some nanoseconds for each byte.

    >>> marks_of(b'{"prompt": [' + b"[]," * 700_000 + b"0]}") is None
    True
    """
    total = marks(body)
    if len(body) >= REFUSE_FROM_BYTES and total > MOST_LISTS and _too_many(body):
        return None
    return total


def parser_for(body: bytes, total: int) -> Parser:
    r"""How to read ``body``, which has ``total`` marks: flat, if many of them are outside texts.

    >>> text = b'{"prompt": "' + b"[Yes, no], " * 200_000 + b'"}'
    >>> parser_for(text, marks(text)) is whole_request
    True
    >>> turns = b'{"messages": [' + b'{"role":"user"},' * 30_000 + b"0]}"
    >>> parse = parser_for(turns, marks(turns))
    >>> parse is whole_request, type(parse(b"")["messages"])  # read before, and read flat
    (False, <class 'str'>)
    """
    if total <= FLAT_MARKS:
        return whole_request
    fields = read_fields(body)
    may_be_text = fields is not None and total < MOST_TEXT_MARKS * len(body)
    if may_be_text and total - marks_in_texts(fields, total - FLAT_MARKS) <= FLAT_MARKS:
        return whole_request

    def parsed(_: bytes) -> dict[str, Any] | None:
        return None if fields is None else request_of(fields)

    return parsed


def promises_many(body: bytes) -> bool:
    """Whether the long ``body`` may have very many values, by a look at each hundredth byte."""
    return marks(body[::_stride]) * _stride > LOOK_CLOSER


def _too_many(body: bytes) -> bool:
    bare = body
    if b"\\" in body:
        bare = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    if bare.count(b'"') > 2 * MOST_STRINGS:
        return True
    lists = commas = 0
    for outside in bare.split(b'"')[::2]:
        lists += outside.count(b"[") + outside.count(b"{")
        commas += outside.count(b",")
    return lists > MOST_LISTS or commas > MOST_COMMAS
