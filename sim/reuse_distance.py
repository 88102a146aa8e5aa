"""How many blocks were touched since a block's last touch: LRU stack distances (Mattson et al., 1970).

A block is a hit in an LRU cache exactly if fewer blocks than the cache holds were touched since its last
touch. A request touches its blocks last to first, so a head is always younger than its tail: hits are
prefixes, as in the replica's cache.
"""

from collections.abc import Iterator, Sequence


def reuse_distances(
    prompts: Sequence[tuple[Sequence[int], int]], block_tokens: int
) -> Iterator[tuple[int, ...]]:
    """Per prompt, in order: of every block that was there before and may be a hit, the blocks an LRU cache
    must hold for it. They never fall from one block to the next.

    ``prompts`` are (block ids, prompt tokens). The last token of a prompt is always computed, so a block
    that ends it has no distance. Cost: ``n log n`` in blocks.

    Three blocks in turn; the second time round each was touched 3 blocks ago:

    >>> list(reuse_distances([((block,), 17) for block in (1, 2, 3, 1, 2, 3)], 16))
    [(), (), (), (3,), (3,), (3,)]
    """
    live = _Counts(1 + sum(len(block_ids) for block_ids, _ in prompts))
    last: dict[int, int] = {}
    clock = 0
    for block_ids, prompt_tokens in prompts:
        usable = (prompt_tokens - 1) // block_tokens
        known = [block for block in block_ids if block in last]
        yield tuple(
            live.from_on(last[block])
            for place, block in enumerate(known)
            if place < usable and block_ids[place] == block
        )
        for block in known:
            live.add(last[block], -1)
        for block in reversed(block_ids):
            clock += 1
            last[block] = clock
            live.add(clock, 1)


class _Counts:
    """Sums over a range, one cell changed at a time (Fenwick tree)."""

    __slots__ = ("_cells", "_total")

    def __init__(self, size: int) -> None:
        self._cells = [0] * (size + 1)
        self._total = 0

    def add(self, place: int, change: int) -> None:
        self._total += change
        cells = self._cells
        while place < len(cells):
            cells[place] += change
            place += place & -place

    def from_on(self, place: int) -> int:
        """The sum from ``place`` to the end."""
        below = place - 1
        total = self._total
        while below > 0:
            total -= self._cells[below]
            below -= below & -below
        return total
