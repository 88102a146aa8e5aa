"""A run of blocks in the prefix index's tree, and who holds it: as few bytes as possible.

Most nodes are the unshared ends of prompts, held by one replica: there may be a million of them. So a node is
itself the hold of its first holder; only holds of others are objects of their own. Each replica's holds are
linked in the order of their last use. What a prompt uses is linked tail first, so a hold is always older than
the holds of the nodes above it: the oldest one is a leaf of what its replica holds, and no heap is needed.
Where tenants are told apart, a replica has a ring for each namespace (``Space``), and holds know when they
were last used, so that rings can be compared.

::

    oldest <-> [chat A: turn 3] <-> [chat A: turns 1-2] <-> [system prompt] <-> newest, then around
"""

from array import array
from typing import Final, Optional


class Hold:
    """One replica's, in the ring of its holds. One of no node is the ring's end: between newest and oldest.

    >>> ring, a, b = Hold(0), Hold(0), Hold(0)
    >>> ring.older = ring.newer = ring
    >>> a.link(ring), b.link(ring), ring.newer is a, ring.older is b
    (None, None, True, True)
    >>> a.unlink(), a.link(b), ring.newer is a, b.unlink(), ring.older is a
    (None, None, True, None, True)
    """

    __slots__ = ("newer", "older", "replica", "tick")

    newer: "Hold"
    older: "Hold"

    def __init__(self, replica: int) -> None:
        self.replica = replica
        self.tick = 0
        """Of the last use by a tenant."""

    def link(self, newer: "Hold") -> None:
        """Stand just below ``newer``."""
        older = newer.older
        older.newer = newer.older = self
        self.older = older
        self.newer = newer

    def unlink(self) -> None:
        """Leave the ring."""
        self.older.newer = self.newer
        self.newer.older = self.older


class Space:
    """The rings of one namespace, by replica, and how much is in them. One without a name is nobody's."""

    __slots__ = ("held", "name", "rings")

    def __init__(self, name: str) -> None:
        self.name = name
        self.rings: dict[int, Hold] = {}
        """Their ends."""
        self.held: dict[int, int] = {}
        """Units; kept for those that have a name."""

    def count(self, replica: int, units: int) -> None:
        """``replica`` holds so many more there."""
        self.held[replica] = self.held.get(replica, 0) + units

    def add_ring(self, replica: int) -> None:
        """``replica`` is about to hold something there."""
        ring = self.rings[replica] = Hold(replica)
        ring.older = ring.newer = ring


class Node(Hold):
    """A run of blocks, and the hold of its first holder, ``replica``."""

    __slots__ = ("children", "keys", "mask", "others", "parent", "space", "start")

    def __init__(
        self, replica: int, keys: "array[int]", start: int, parent: Optional["Node"], space: Space
    ) -> None:
        self.replica = replica
        self.tick = 0
        self.space = space
        """Whose cache salt is in the keys."""
        self.keys = keys
        self.start = start
        """Blocks before this node."""
        self.parent = parent
        self.children = NO_CHILDREN
        """By their first key."""
        self.mask = 0
        """All holders as bits."""
        self.others: list[OtherHold] | None = None
        """Holds of all but the first holder, in the order of their replicas."""

    @property
    def stop(self) -> int:
        """Blocks up to the end of this node."""
        return self.start + len(self.keys)

    def add_child(self, child: "Node") -> None:
        """``child`` follows."""
        if self.children is NO_CHILDREN:
            self.children = {}
        self.children[child.keys[0]] = child

    def drop_child(self, child: "Node") -> None:
        """``child`` follows no longer."""
        del self.children[child.keys[0]]
        if not self.children:
            self.children = NO_CHILDREN

    def hold(self, replica: int, bit: int) -> Hold:
        """The hold of ``replica``, which has one; ``bit`` is ``1 << replica``."""
        if self.replica == replica or self.others is None:
            return self
        return self.others[self._place(replica, bit)]

    def _place(self, replica: int, bit: int) -> int:
        """Where among the others ``replica`` stands: after those of lower index."""
        return (self.mask & (bit - 1)).bit_count() - (self.replica < replica)

    def new_hold(self, replica: int, bit: int) -> Hold:
        """``replica`` holds it, too: its hold, to be linked."""
        if not self.mask:
            self.mask = bit
            self.replica = replica
            return self
        hold = OtherHold(replica, self)
        if self.others is None:
            self.others = [hold]
        else:
            self.others.insert(self._place(replica, bit), hold)
        self.mask |= bit
        return hold

    def release(self, replica: int, bit: int) -> None:
        """``replica`` holds it no longer."""
        others = self.others
        if self.replica != replica:
            assert others is not None
            others.pop(self._place(replica, bit)).unlink()
        else:
            self.unlink()
            if others is not None:  # another one becomes the first holder
                hold = others.pop()
                self.replica, self.tick = hold.replica, hold.tick
                self.link(hold)
                hold.unlink()
        self.mask ^= bit
        if not others:
            self.others = None


class OtherHold(Hold):
    """A hold of a node's second or later holder."""

    __slots__ = ("node",)

    def __init__(self, replica: int, node: Node) -> None:
        self.replica = replica
        self.tick = 0
        self.node = node


NO_CHILDREN: Final[dict[int, Node]] = {}
"""Every leaf's; never added to."""


def node_of(hold: Hold) -> Node:
    """Whose hold it is. A ring's end is nobody's: not to be asked of."""
    if isinstance(hold, OtherHold):
        return hold.node
    assert isinstance(hold, Node)
    return hold


def moved(bottom: Hold, top: Hold, above: Hold) -> Hold:
    """Put what stands from ``bottom`` up to ``top`` below ``above``, and return ``bottom``."""
    if top is not above and top.newer is not above:
        older, newer = bottom.older, top.newer
        older.newer = newer
        newer.older = older
        bottom.older = older = above.older
        older.newer = bottom
        top.newer = above
        above.older = top
    return bottom


def ring_length(space: Space, replica: int, root: Node) -> int:
    """How many holds are in the ring of ``replica``; raises ``AssertionError`` if it is out of order."""
    ring = hold = space.rings[replica]
    seen: set[Node | None] = {root}
    while (hold := hold.older) is not ring:
        node = node_of(hold)
        assert hold.newer.older is hold and hold.replica == replica, "ring"
        assert hold is node.hold(replica, 1 << replica) and node.mask >> replica & 1, "a hold of nothing"
        assert node.space is space, "in another's ring"
        assert hold.newer is ring or hold.tick <= hold.newer.tick, "ticks"
        assert node.parent in seen, "a node used later than the one above it"
        seen.add(node)
    return len(seen) - 1
