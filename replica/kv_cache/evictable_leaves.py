"""The leaves that may give up memory, in the order of an eviction order: a heap that forgets lazily."""

from heapq import heapify, heappop, heappush

from replica.kv_cache.eviction_order import EvictionOrder, Rank
from replica.kv_cache.radix_node import Node


class EvictableLeaves:
    """A node enters with ``add`` and leaves with ``discard``; both O(log leaves) amortised.

    An entry is valid while the node carries its ticket; entries that are not are skipped, and swept out when
    they are the majority.
    """

    __slots__ = ("_heap", "_order", "_tickets", "count")

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._heap: list[tuple[Rank, int, Node]] = []
        self._tickets = 0
        self.count = 0
        """Nodes in it."""

    def add(self, node: Node) -> None:
        """Let a node in; it must not be in."""
        assert node.ticket == 0, node
        self._tickets += 1
        node.ticket = self._tickets
        self.count += 1
        heappush(self._heap, (self._order.rank(node), node.ticket, node))
        if len(self._heap) > 64 + 2 * self.count:
            self._heap = [entry for entry in self._heap if entry[2].ticket == entry[1]]
            heapify(self._heap)

    def discard(self, node: Node) -> None:
        """Take a node out, wherever it stands; nothing happens when it is not in."""
        if node.ticket:
            node.ticket = 0
            self.count -= 1

    def take(self) -> tuple[Node, int]:
        """Take out the first in order, with the number of units it gives up at this rank.

        Raises IndexError when nobody is in.
        """
        while True:
            _, ticket, node = heappop(self._heap)
            if node.ticket == ticket:
                self.discard(node)
                return node, self._order.most(node)

    def clear(self) -> None:
        """Forget everybody."""
        self._heap.clear()
        self.count = 0

    def check_invariants(self, leaves: list[Node]) -> None:
        """Raise AssertionError unless exactly ``leaves`` are in, each with its present rank."""
        entries = {entry[2]: entry for entry in self._heap if entry[2].ticket == entry[1]}
        assert set(entries) == set(leaves), "evictable leaves differ from those the tree has"
        assert len(entries) == self.count
        for node, (rank, _, _) in entries.items():
            assert rank == self._order.rank(node), f"{node} has moved in the order without notice"
