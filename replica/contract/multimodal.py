"""Images and the like in a prompt, as far as the identity of blocks needs them: which, and where.

Every image takes the same placeholder tokens, so tokens do not tell two of them apart. A block that an item
reaches into is therefore named by the item, too, and by where the item begins, counted from the block's
start (vLLM's form: negative when it began in an earlier block).

Blocks of 4, an image at positions 2 to 5:

>>> cat = MultimodalItem("cat", offset=2, tokens=4)
>>> [multimodal_keys([cat], start, start + 4) for start in (0, 4, 8)]
[(('cat', 2),), (('cat', -2),), ()]
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

MultimodalKey = tuple[str, int]
"""An item's identifier and where it begins, in tokens from the start of a block."""

NO_TOKEN = b"\xff\xff\xff\xff"
"""-1 as int32: what follows a block's tokens is never taken for more of them."""


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One image, recording or video, and the placeholder tokens that stand for it."""

    identifier: str
    """Names its content: a digest of it, or what the client calls it."""
    offset: int
    """Position of its first token in the prompt."""
    tokens: int


def check_items(items: Sequence[MultimodalItem], prompt_tokens: int) -> None:
    """Raise ValueError unless the items are in order, apart, within the prompt, and named by proper text.

    >>> check_items([MultimodalItem("cat", 2, 4), MultimodalItem("dog", 5, 1)], 8)
    Traceback (most recent call last):
    ...
    ValueError: item 'dog' at 5 to 6: expected at least one token, within 6 to 8
    """
    free = 0
    for item in items:
        item.identifier.encode()
        stop = item.offset + item.tokens
        if item.offset < free or item.tokens < 1 or stop > prompt_tokens:
            raise ValueError(
                f"item {item.identifier!r} at {item.offset} to {stop}: expected at least one token, "
                f"within {free} to {prompt_tokens}"
            )
        free = stop


def multimodal_keys(items: Iterable[MultimodalItem], start: int, stop: int) -> tuple[MultimodalKey, ...]:
    """Of the items with a token among positions ``start .. stop - 1``, in their order."""
    return tuple(
        (item.identifier, item.offset - start)
        for item in items
        if item.offset < stop and start < item.offset + item.tokens
    )


def multimodal_frame(keys: Iterable[MultimodalKey]) -> bytes:
    """What a block's name adds to its tokens: nothing for no keys; equal for equal keys alone.

    >>> multimodal_frame([("cat", -2)])
    b'\\xff\\xff\\xff\\xff multimodal 3 cat -2'
    """
    frame = b""
    for identifier, offset in keys:
        raw = identifier.encode()
        frame += b" multimodal %d %b %d" % (len(raw), raw, offset)
    return NO_TOKEN + frame if frame else b""
