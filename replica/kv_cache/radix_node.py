"""One edge of the radix tree: a run of units, the memory that holds their KV, who is below, who pins it."""

from collections.abc import Hashable, Sequence

from replica.contract.kv_events import BlockHash

Unit = int | bytes
"""What one page of KV stands for: a token (page size 1), a page's raw token bytes, or an opaque block id."""


class Node:
    """``units[i]`` has its KV in page ``slots[i]``; both lists are as long as the edge.

    Positions count units from the root: the node covers ``start .. start + len(units) - 1``. ``pins`` counts
    the sequences whose path comes through here, so a parent's are never fewer than a child's. ``hashes`` are
    those of the event blocks that end inside the node.
    """

    __slots__ = (
        "children",
        "hashes",
        "last_use",
        "lost",
        "namespace",
        "parent",
        "pins",
        "slots",
        "start",
        "ticket",
        "units",
        "uses",
    )

    def __init__(self, parent: "Node | None", start: int, namespace: Hashable = None) -> None:
        self.parent = parent
        self.start = start
        self.namespace = namespace
        """Of a root only."""
        self.units: list[Unit] = []
        self.slots: list[int] = []
        self.hashes: list[BlockHash] = []
        self.children: dict[Unit, Node] = {}
        """By their first unit."""
        self.pins = 0
        self.uses = 1
        """Times it was stored or hit."""
        self.last_use = 0
        """Tick of the last adoption or release that came through."""
        self.lost = 0
        """Units that were evicted from below its end since it was last used."""
        self.ticket = 0
        """Its valid entry among the evictable leaves; 0: it has none."""

    @property
    def end(self) -> int:
        """Units from the root to the node's end."""
        return self.start + len(self.units)

    def __repr__(self) -> str:
        return f"Node({self.start}..{self.end}, pins={self.pins}, children={len(self.children)})"


def common_length(edge: Sequence[Unit], units: Sequence[Unit], start: int, stop: int) -> int:
    """How many units of ``edge`` agree with ``units[start:stop]``, from the front.

    Compares slices, first the whole, then by halves: O(length) with a small constant.

    >>> common_length([5, 6, 7, 8], [0, 5, 6, 9], 1, 4), common_length([5], [5, 6], 0, 2)
    (2, 1)
    """
    low, high = 0, min(len(edge), stop - start)
    if edge[:high] == units[start : start + high]:
        return high
    # The first `low` agree, the first `high` do not.
    while high - low > 1:
        middle = (low + high) // 2
        if edge[low:middle] == units[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low
