"""A radix tree over pages of KV: find, split, grow, pin, evict. It knows neither sequences nor free pages.

Three prompts; the second shares three tokens with the first, the third is of another namespace::

    root --[1 2 3]--+--[4 5]      slots 10 11 12, then 13 14
                    +--[9]        slot 20

>>> from replica.kv_cache.eviction_order import LeastRecent
>>> tree = RadixTree(LeastRecent())
>>> first = tree.grow(tree.keep("a", NOWHERE), [1, 2, 3, 4, 5], [10, 11, 12, 13, 14], [])
>>> tree.unpin(first)
>>> place = tree.locate("a", [1, 2, 3, 9], 4)
>>> len(place), tree.nodes                       # 3 units match; to look changes nothing
(3, 2)
>>> second = tree.grow(tree.keep("a", place), [9], [20], [])      # to keep what matched splits the edge
>>> tree.slots_to(second), len(tree.locate("b", [1, 2, 3], 3))
([10, 11, 12, 20], 0)
>>> tree.evict(1), tree.evict(1), tree.evictable        # the shared part is pinned: only 4 and 5 could go
([14], [13], 0)
"""

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from replica.contract.kv_events import BlockHash
from replica.kv_cache.cache import Evicted
from replica.kv_cache.evictable_leaves import EvictableLeaves
from replica.kv_cache.eviction_order import EvictionOrder
from replica.kv_cache.radix_node import Node, Unit, common_length


@dataclass(frozen=True, slots=True)
class Place:
    """Where a walk ended: after ``used`` units of ``node``; its length counts units from the root."""

    node: Node | None
    """None: the namespace holds nothing."""
    used: int
    length: int

    def __len__(self) -> int:
        return self.length


NOWHERE = Place(None, 0, 0)


class RadixTree:
    """``hash_units``: an event block is that many units. Hashes that go are appended to ``removed``.

    A unit is in the tree once: what is stored twice is the caller's to notice (``locate``) and to free.
    """

    def __init__(
        self, order: EvictionOrder, hash_units: int = 1, evictions: list[Evicted] | None = None
    ) -> None:
        self.roots: dict[Hashable, Node] = {}
        self.cached = 0
        """Units in the tree."""
        self.evictable = 0
        """Of those, units that nobody pins."""
        self.nodes = 0
        """Roots among them."""
        self.removed: list[BlockHash] = []
        self.hash_counts: Counter[BlockHash] = Counter()
        """How often each hash is in the tree: once, unless hashes collide."""
        self._hash_units = hash_units
        self._evictions = evictions
        self._leaves = EvictableLeaves(order)
        self._tick = 0

    # Questions

    def locate(self, namespace: Hashable, units: Sequence[Unit], limit: int) -> Place:
        """The longest prefix of ``units[:limit]`` that is here. Reads only."""
        node = self.roots.get(namespace)
        if node is None:
            return NOWHERE
        at = used = 0
        while at < limit and (child := node.children.get(units[at])) is not None:
            node = child
            used = common_length(child.units, units, at, limit)
            at += used
            if used < len(child.units):
                break
        return Place(node, used, at)

    def shorten(self, place: Place, length: int) -> Place:
        """The place ``length`` units from the root on the way to ``place``."""
        node = place.node
        if node is None or length >= place.length:
            return place
        while node.parent is not None and length <= node.start:
            node = node.parent
        return Place(node, length - node.start if node.parent is not None else 0, length)

    def idle(self, place: Place) -> int:
        """Units on the way to ``place`` that nobody pins."""
        count = 0
        node, used = place.node, place.used
        while node is not None and node.pins == 0:
            count += used
            node = node.parent
            used = len(node.units) if node is not None else 0
        return count

    def slots_to(self, node: Node) -> list[int]:
        """The pages from the root to the node's end."""
        parts = [way.slots for way in self.path(node)]
        slots: list[int] = []
        for part in reversed(parts):
            slots += part
        return slots

    @staticmethod
    def path(node: Node) -> Iterator[Node]:
        """The node, its parent, and so on, without the root."""
        while node.parent is not None:
            yield node
            node = node.parent

    def split(self, node: Node, at: int) -> Node:
        """Cut an edge after ``at`` of its units; the new upper part. The lower part stays the same object."""
        parent = node.parent
        assert parent is not None and 0 < at < len(node.units)
        upper = Node(parent, node.start)
        upper.pins, upper.uses, upper.last_use = node.pins, node.uses, node.last_use
        ends = (node.start + at) // self._hash_units - node.start // self._hash_units
        upper.units, node.units = node.units[:at], node.units[at:]
        upper.slots, node.slots = node.slots[:at], node.slots[at:]
        upper.hashes, node.hashes = node.hashes[:ends], node.hashes[ends:]
        parent.children[upper.units[0]] = upper
        upper.children[node.units[0]] = node
        node.parent = upper
        node.start += at
        self.nodes += 1
        return upper

    # Pins and shape

    def keep(self, namespace: Hashable, place: Place) -> Node:
        """Pin everything up to ``place``, which counts as used now; the node that ends there.

        An edge in the middle of which the place lies is split; that changes nothing that can be seen from
        outside.
        """
        node = place.node
        if node is None:
            node = self._root(namespace)
        elif place.used < len(node.units):
            node = self.split(node, place.used)
        self._tick += 1
        at: Node | None = node
        while at is not None:
            self._pin(at)
            at.last_use = self._tick
            at = at.parent
        return node

    def keep_child(self, child: Node) -> None:
        """Pin a node too whose parent the caller keeps: its content was stored once more."""
        assert child.parent is not None
        self._pin(child)
        child.uses += 1
        child.lost = 0
        child.last_use = child.parent.last_use

    def unpin(self, node: Node) -> None:
        """Undo one ``keep`` and what led on to ``node`` (``keep_child``, ``grow``); it was used until now.

        Raises ValueError when nobody pins it.
        """
        self._tick += 1
        at: Node | None = node
        while at is not None:
            if at.pins < 1:
                raise ValueError(f"{at} unpinned but nobody pins it")
            at.pins -= 1
            at.last_use = self._tick
            if at.pins == 0:
                self.evictable += len(at.units)
            at = at.parent
        self._settle_leaf(node)

    def count_hit(self, node: Node) -> None:
        """What leads to the node was used once more."""
        for at in self.path(node):
            at.uses += 1
            at.lost = 0

    # What is held

    def grow(self, node: Node, units: Sequence[Unit], slots: list[int], hashes: Sequence[BlockHash]) -> Node:
        """Store ``units`` after the end of ``node``, which the caller pins; the node that ends with them.

        It is pinned by the caller too. ``hashes`` are those of the event blocks that end among the units. A
        leaf that only the caller pins grows in place, so a decode costs O(1).
        """
        if node.parent is None or node.children or node.pins > 1:
            child = Node(node, node.end)
            child.pins = 1
            child.last_use = node.last_use
            assert units[0] not in node.children
            node.children[units[0]] = child
            self.nodes += 1
            node = child
        node.lost = 0
        node.units += units
        node.slots += slots
        node.hashes += hashes
        self.cached += len(units)
        self.hash_counts.update(hashes)
        return node

    def evict(self, count: int) -> list[int]:
        """Give up ``count`` units, leaf ends first; their pages. IndexError when fewer are evictable."""
        if count > self.evictable:
            raise IndexError(f"{count} units wanted, {self.evictable} evictable")
        freed: list[int] = []
        while len(freed) < count:
            node, most = self._leaves.take()
            units = min(most, count - len(freed))
            self._forget_hashes(node, len(node.units) - units)
            freed += node.slots[: -units - 1 : -1]
            first = node.units[0]
            del node.slots[-units:], node.units[-units:]
            node.lost += units
            self.cached -= units
            self.evictable -= units
            if node.units:
                self._leaves.add(node)
                continue
            parent = node.parent
            assert parent is not None
            del parent.children[first]
            node.parent = None
            self.nodes -= 1
            parent.lost = max(parent.lost, node.lost)
            self._settle_leaf(parent)
        return freed

    def clear(self) -> None:
        """Forget everything. Only while nobody pins anything."""
        self.roots.clear()
        self._leaves.clear()
        self.hash_counts.clear()
        self.removed.clear()
        self.cached = self.evictable = self.nodes = 0

    def _root(self, namespace: Hashable) -> Node:
        node = self.roots.get(namespace)
        if node is None:
            node = self.roots[namespace] = Node(None, 0, namespace)
            self.nodes += 1
        return node

    def _pin(self, node: Node) -> None:
        if node.pins == 0:
            self.evictable -= len(node.units)
            self._leaves.discard(node)
        node.pins += 1

    def _settle_leaf(self, node: Node) -> None:
        """A node that may have become an unpinned leaf: evictable from now on; a root is dropped."""
        if node.pins or node.children:
            return
        if node.parent is not None:
            self._leaves.add(node)
        elif self.roots.pop(node.namespace, None) is not None:
            self.nodes -= 1

    def _forget_hashes(self, node: Node, keep_units: int) -> None:
        """Event blocks that end after the first ``keep_units`` units of the node are whole no longer."""
        if not node.hashes:
            return
        size = self._hash_units
        keep = (node.start + keep_units) // size - node.start // size
        for place in range(len(node.hashes) - 1, keep - 1, -1):
            block_hash = node.hashes[place]
            if self.hash_counts[block_hash] > 1:
                self.hash_counts[block_hash] -= 1
                continue
            del self.hash_counts[block_hash]
            self.removed.append(block_hash)
            if self._evictions is not None:
                end = (node.start // size + place + 1) * size
                self._evictions.append(Evicted(block_hash, self._slots(node, end - size, end)))
        del node.hashes[keep:]

    def _slots(self, node: Node, start: int, stop: int) -> tuple[int, ...]:
        """Pages of positions ``start .. stop - 1``, which end in the node and may begin above it."""
        parts = []
        at: Node | None = node
        while at is not None and stop > start:
            parts.append(at.slots[max(0, start - at.start) : stop - at.start])
            stop = min(stop, at.start)
            at = at.parent
        return tuple(slot for part in reversed(parts) for slot in part)

    # Checks

    def walk(self) -> Iterator[Node]:
        """Every node that can be reached, roots too, parents first."""
        nodes = list(self.roots.values())
        while nodes:
            node = nodes.pop()
            yield node
            nodes += node.children.values()

    def check_invariants(self) -> None:
        """Raise AssertionError unless links, counts, pins, hashes and the evictable leaves agree. O(tree)."""
        reachable = list(self.walk())
        assert len(reachable) == self.nodes == len(set(reachable)), "nodes lost or met twice"
        hashes: Counter[BlockHash] = Counter()
        for node in reachable:
            assert len(node.units) == len(node.slots), node
            for first, child in node.children.items():
                assert child.parent is node and child.start == node.end, (node, child)
                assert child.units and child.units[0] == first, (node, child)
                assert child.pins <= node.pins and child.last_use <= node.last_use, (node, child)
            if node.parent is None:
                assert self.roots[node.namespace] is node and not node.units
                assert node.pins or node.children, "an empty namespace is kept"
            elif node.hashes:
                ends = node.end // self._hash_units - node.start // self._hash_units
                assert len(node.hashes) == ends, node
            hashes.update(node.hashes)
        assert hashes == self.hash_counts
        inner = [node for node in reachable if node.parent is not None]
        assert self.cached == sum(len(node.units) for node in inner)
        assert self.evictable == sum(len(node.units) for node in inner if node.pins == 0)
        self._leaves.check_invariants([node for node in inner if node.pins == 0 and not node.children])
