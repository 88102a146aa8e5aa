"""Block ids for made-up prompts: equal beginnings get equal ids, however the prompt was put together."""

from collections.abc import Iterable

Segment = tuple[object, int]
"""A piece of text by name, and its length in tokens. Equal names are equal text."""


class BlockNames:
    """Names blocks in order of first appearance; ``block_tokens`` tokens each.

    Two prompts with one system prompt of 100 tokens and passages in another order, blocks of 64:

    >>> names = BlockNames(64)
    >>> names.ids([("system", 100), ("a", 64), ("b", 64)])
    (0, 1, 2)
    >>> names.ids([("system", 100), ("b", 64), ("a", 64)])
    (0, 3, 4)
    >>> names.ids([("system", 100), ("a", 64), ("c", 30)])
    (0, 1, 5)
    """

    __slots__ = ("_known", "block_tokens")

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self._known: dict[object, int] = {}

    def ids(self, segments: Iterable[Segment]) -> tuple[int, ...]:
        """The ids of the full blocks of a prompt. Cost: O(blocks + segments)."""
        size, known = self.block_tokens, self._known
        ids: list[int] = []
        parent = -1
        pieces: list[tuple[object, int, int]] = []
        room = size
        for name, tokens in segments:
            start = 0
            while start < tokens:
                count = min(room, tokens - start)
                pieces.append((name, start, count))
                start += count
                room -= count
                if not room:
                    parent = known.setdefault((parent, *pieces), len(known))
                    ids.append(parent)
                    pieces = []
                    room = size
        return tuple(ids)
