"""Whether a JSON body holds so many values that parsing it would hold the event loop: told without parsing.

A long text is one value and quickly parsed, however long. Nineteen million empty lists in 57 MB took 3.5 s.
"""

from typing import Final

CHECK_FROM_BYTES: Final = 1024 * 1024
"""Shorter bodies cannot hold the loop for long."""
MOST_STRINGS: Final = 100_000
MOST_LISTS: Final = 100_000
"""Objects are counted as lists."""
MOST_COMMAS: Final = 1_500_000
"""A prompt of a million token ids has a million."""


def is_crowded(body: bytes) -> bool:
    r"""Whether the long ``body`` has more strings, lists or values than any request needs.

    What is inside strings does not count. Cost: a few scans of the body, O(bytes).

    >>> text = b'{"prompt": "' + b"[,]" * 700_000 + b'"}'
    >>> is_crowded(text), is_crowded(b'{"prompt": [' + b"[]," * 700_000 + b"0]}")
    (False, True)
    """
    if len(body) < CHECK_FROM_BYTES:
        return False
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
