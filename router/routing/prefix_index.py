"""The prefix index: what the router believes each replica's prefix cache holds, bounded per replica.

One radix tree over chained block keys serves all replicas. A node is a run of blocks that knows which
replicas hold it; each replica's nodes stand in the order of their last use (``prefix_node``). Because a key
names its whole prefix, a run matches if its last key does, and a partial match is found by bisection.
A replica that holds a node holds all nodes above it, so what it holds is a tree too, and its least recently
used leaves are forgotten first: tails before heads, as engines do. Of a tenant's namespace no more is kept
than its share; for what is more, its own least recently used leaves are forgotten.

::

    root ── [system prompt] ──┬── [chat A: turns 1-3]     held by 0
            held by 0 and 1   └── [chat B: turn 1]        held by 1

Memory per block and replica: 44 to 48 bytes for prompts with 8 blocks of their own, 12 for 72
(``python -m tests.router.test_index_memory``).
"""

from array import array
from collections.abc import Iterator, Sequence

from router.routing.key_runs import common_keys, listed
from router.routing.prefix_node import Hold, Node, OtherHold, Space, moved, node_of, ring_length
from router.routing.prefix_spaces import Spaces
from router.routing.prompt_blocks import BlockLayout
from router.routing.tenant import Tenant


class PrefixIndex:
    """Which replica holds how much of which prompt. Sizes are in the layout's units (bytes or tokens).

    >>> from router.routing.prompt_blocks import UniformLayout
    >>> index = PrefixIndex(replicas=2, layout=UniformLayout(16), capacity=64)   # four blocks each
    >>> index.insert(0, [1, 2, 3])
    >>> index.insert(1, [1, 9])
    >>> index.match([1, 2, 3, 4])                     # blocks matched, by replica
    [3, 1]
    >>> index.insert(0, [1, 7, 8])                    # five blocks: the oldest tail, 3, has to go
    >>> index.match([1, 2, 3, 4]), index.held(0)
    ([2, 1], 64)
    """

    def __init__(self, replicas: int, layout: BlockLayout, capacity: int) -> None:
        self._layout = layout
        self._spaces = Spaces()
        self._nobodys = self._spaces.nobodys
        self._root = Node(0, array("Q"), 0, None, self._nobodys)
        self._capacity: list[int] = []
        self._held: list[int] = []
        self._bits: list[int] = []
        self._all = 0
        for _ in range(replicas):
            self.add_replica(capacity)

    def add_replica(self, capacity: int) -> int:
        """Make room for one more replica, holding nothing; returns its index."""
        self._capacity.append(capacity)
        self._bits.append(1 << len(self._held))
        self._held.append(0)
        self._spaces.add_replica()
        self._all = (1 << len(self._held)) - 1
        return len(self._held) - 1

    def held(self, replica: int) -> int:
        """Units ``replica`` is believed to hold."""
        return self._held[replica]

    def held_of(self, replica: int, namespace: str) -> int:
        """Of them, those of one tenant or group."""
        return self._spaces.held(replica, namespace)

    def capacity(self, replica: int) -> int:
        """Units the index keeps for ``replica`` at most."""
        return self._capacity[replica]

    def set_capacity(self, replica: int, units: int) -> None:
        """Bound what is kept for ``replica``; what is over is forgotten now."""
        self._capacity[replica] = units
        self._evict(replica)

    def levels(self, keys: Sequence[int]) -> list[tuple[int, int]]:
        """Who holds how many leading blocks of ``keys``: (replicas as bits, blocks), the deepest last.

        Each replica that holds any is in one level. Reads only. Cost: one walk for all replicas, O(nodes on
        the path), not O(blocks x replicas).
        """
        levels: list[tuple[int, int]] = []
        keys = listed(keys)
        alive = self._all
        node = self._root
        depth, length = 0, len(keys)
        while depth < length:
            child = node.children.get(keys[depth])
            if child is None:
                break
            here = alive & child.mask
            if depth and here != alive:
                levels.append((alive ^ here, depth))
            alive = here
            if not alive:
                return levels
            common = common_keys(child.keys, keys, depth, length)
            depth += common
            if common < len(child.keys):
                break
            node = child
        if depth:
            levels.append((alive, depth))
        return levels

    def match(self, keys: Sequence[int]) -> list[int]:
        """Leading blocks of ``keys`` each replica holds, by replica. Reads only."""
        matched = [0] * len(self._held)
        for mask, blocks in self.levels(keys):
            while mask:
                low = mask & -mask
                matched[low.bit_length() - 1] = blocks
                mask ^= low
        return matched

    def insert(self, replica: int, keys: Sequence[int], tenant: Tenant | None = None) -> None:
        """``replica`` is about to hold all of ``keys``; its least recently used tails make room.

        ``tenant``: whose salt is in the keys, where tenants are told apart.
        """
        keys = listed(keys)
        length = len(keys)
        if not length:
            return
        bit = self._bits[replica]
        space = self._nobodys
        ring = space.rings.get(replica) if tenant is None else None
        if ring is None:
            known = self._root.children.get(keys[0])
            space = self._spaces.entered(replica, None if known is None else known.space, tenant)
            ring = space.rings[replica]
        above = ring  # its holds on the path stand below each other, from the newest down
        top = bottom = above  # what stands so already and moves there together; nothing where it is ``above``
        node, depth = self._root, 0
        while depth < length:
            child = node.children.get(keys[depth])
            if child is None:
                above = bottom = top = moved(bottom, top, above)
                node = self._append(node, replica, keys, depth, above, space)
                break
            common = common_keys(child.keys, keys, depth, length)
            if common < len(child.keys) and (common + depth < length or not child.mask & bit):
                child = self._split(child, common)
            # else the prompt ends inside what the replica holds: a use of the run, nothing new.
            if not child.mask & bit:
                above = moved(bottom, top, above)
                bottom = top = child.new_hold(replica, bit)
                bottom.link(above)
                above = bottom
                units = self._layout.end(child.stop) - self._layout.end(child.start)
                self._held[replica] += units
                if space is not self._nobodys:
                    space.count(replica, units)
            else:
                hold = bottom.older
                if hold is child or (isinstance(hold, OtherHold) and hold.node is child):
                    if top is above:
                        above = top = hold
                    bottom = hold
                else:
                    above = moved(bottom, top, above)
                    bottom = top = child.hold(replica, bit)
            depth += common
            node = child
        moved(bottom, top, above)
        if tenant is not None:
            self._used(replica, node)
        if self._held[replica] > self._capacity[replica]:
            self._evict(replica)
        if tenant is not None:
            self._keep_share(replica, space, int(tenant.index_share * self._capacity[replica]))

    def truncate(self, replica: int, keys: Sequence[int], blocks: int) -> None:
        """``replica`` turned out to hold only the first ``blocks`` of ``keys``: forget what follows."""
        keys = listed(keys)
        node, depth, length = self._root, 0, len(keys)
        bit = self._bits[replica]
        while depth < length:
            child = node.children.get(keys[depth])
            if child is None or not child.mask & bit:
                return
            common = common_keys(child.keys, keys, depth, length)
            if depth + common > blocks:
                if depth < blocks:
                    child = self._split(child, blocks - depth)
                    # What is forgotten stands below the split, on the path of ``keys``.
                    node, depth = child, blocks
                    continue
                self._forget_subtree(child, replica)
                return
            if common < len(child.keys):
                return
            depth += common
            node = child

    def clear(self, replica: int) -> None:
        """``replica`` holds nothing any more."""
        for space in self._spaces.of(replica):
            ring = space.rings[replica]
            while ring.newer is not ring:
                self._release(node_of(ring.newer), replica)
        self._spaces.emptied(replica)

    def chains(self, replica: int) -> Iterator[tuple[str, Sequence[int]]]:
        """Key chains that make up all ``replica`` holds, with their namespace, the least recently used first.

        The index may change meanwhile: what is gone by then is left out. Cost: O(nodes) at the start, then
        O(blocks) for each chain.
        """
        bit = self._bits[replica]
        leaves: list[tuple[int, Node]] = []
        inner: set[Node | None] = set()
        for space in self._spaces.of(replica):
            ring = hold = space.rings[replica]
            while (hold := hold.newer) is not ring:
                node = node_of(hold)
                if node not in inner:
                    leaves.append((hold.tick, node))
                inner.add(node.parent)
        leaves.sort(key=_first)

        def walk() -> Iterator[tuple[str, Sequence[int]]]:
            for _, leaf in leaves:
                if leaf.parent is None or not leaf.mask & bit:
                    continue
                runs = []
                node: Node | None = leaf
                while node is not None and node is not self._root:
                    runs.append(node.keys)
                    node = node.parent
                yield leaf.space.name, [key for run in reversed(runs) for key in run]

        return walk()

    def nodes(self) -> int:
        """Nodes in the tree, for size reports. O(nodes)."""
        return sum(1 for _ in self._walk())

    # --- the tree -------------------------------------------------------------------------------

    def _append(
        self, parent: Node, replica: int, keys: list[int], depth: int, above: Hold, space: Space
    ) -> Node:
        """Blocks from ``depth`` on are new to the tree: grow ``parent`` if it is this replica's own leaf.

        The node they are in.
        """
        bit = self._bits[replica]
        units = self._layout.end(len(keys)) - self._layout.end(depth)
        self._held[replica] += units
        if space is not self._nobodys:
            space.count(replica, units)
        if parent is not self._root and parent.mask == bit and not parent.children:
            parent.keys.extend(keys[depth:])
            return parent
        node = Node(replica, array("Q", keys[depth:]), depth, parent, space)
        parent.add_child(node)
        node.new_hold(replica, bit).link(above)
        return node

    def _split(self, node: Node, blocks: int) -> Node:
        """Cut ``node`` after ``blocks`` blocks; the new upper part is returned, ``node`` is the tail."""
        parent = node.parent
        assert parent is not None and 0 < blocks < len(node.keys)
        upper = Node(node.replica, node.keys[:blocks], node.start, parent, node.space)
        upper.new_hold(node.replica, self._bits[node.replica]).link(node.newer)
        upper.tick = node.tick
        if node.others is not None:
            for hold in node.others:
                other = upper.new_hold(hold.replica, self._bits[hold.replica])
                other.tick = hold.tick
                other.link(hold.newer)
        parent.add_child(upper)
        node.keys = node.keys[blocks:]
        node.start += blocks
        node.parent = upper
        upper.add_child(node)
        return upper

    def _release(self, node: Node, replica: int) -> None:
        """``replica`` no longer holds ``node``, of whose children it holds none."""
        parent = node.parent
        assert parent is not None
        node.release(replica, self._bits[replica])
        units = self._layout.end(node.stop) - self._layout.end(node.start)
        self._held[replica] -= units
        if node.space is not self._nobodys:
            node.space.count(replica, -units)
        if not node.mask:
            parent.drop_child(node)
            node.parent = None
            self._merge_only_child(parent)

    def _merge_only_child(self, node: Node) -> None:
        """Undo a split that no longer parts anything: one child with the very same holders."""
        parent = node.parent
        if parent is None or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.mask != node.mask:
            return
        node.unlink()
        if node.others is not None:
            for hold in node.others:
                hold.unlink()
        child.keys = node.keys + child.keys
        child.start = node.start
        child.parent = parent
        parent.children[child.keys[0]] = child
        node.parent = None
        node.mask = 0

    def _forget_subtree(self, top: Node, replica: int) -> None:
        bit = self._bits[replica]
        order, stack = [], [top]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(child for child in node.children.values() if child.mask & bit)
        for node in reversed(order):
            if node.parent is not None and node.mask & bit:
                self._release(node, replica)

    # --- eviction -------------------------------------------------------------------------------

    def _evict(self, replica: int) -> None:
        """Forget what ``replica`` holds over its capacity."""
        capacity = self._capacity[replica]
        while (excess := self._held[replica] - capacity) > 0:
            oldest = self._spaces.oldest(replica)
            if oldest is None:
                return
            self._forget(replica, node_of(oldest), excess)

    def _keep_share(self, replica: int, space: Space, most: int) -> None:
        """Forget what the namespace fills over ``most``."""
        ring = space.rings[replica]
        while (excess := space.held.get(replica, 0) - most) > 0 and ring.newer is not ring:
            self._forget(replica, node_of(ring.newer), excess)

    def _forget(self, replica: int, node: Node, excess: int) -> None:
        """``node`` is its oldest somewhere, and so a leaf of what it holds: its last ``excess`` units go."""
        layout, keep = self._layout, len(node.keys)
        stop = layout.end(node.stop)
        while keep and stop - layout.end(node.start + keep) < excess:
            keep -= 1
        if keep:
            self._split(node, keep)
        self._release(node, replica)

    def _used(self, replica: int, node: Node) -> None:
        """A tenant's prompt ends in ``node``: all it holds of it is as new now."""
        tick, bit = self._spaces.next_tick(), self._bits[replica]
        above: Node | None = node
        while above is not None and above is not self._root:
            above.hold(replica, bit).tick = tick
            above = above.parent

    def _walk(self) -> Iterator[Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if counts, masks, rings or the tree's shape disagree. O(everything)."""
        held = [0] * len(self._held)
        of_space: dict[tuple[Space, int], int] = {}
        for node in self._walk():
            assert node.keys and node.mask, "an empty node"
            holders = [node.replica, *(hold.replica for hold in node.others or ())]
            assert node.mask == sum(1 << r for r in holders), "mask and holders differ"
            parent = node.parent
            assert parent is not None and parent.children[node.keys[0]] is node, "parent link"
            if parent is not self._root:
                assert node.start == parent.stop, "start"
                assert node.mask & ~parent.mask == 0, "a child is held where its parent is not"
                assert node.space is parent.space, "space"
            for replica in holders:
                units = self._layout.end(node.stop) - self._layout.end(node.start)
                held[replica] += units
                place = node.space, replica
                of_space[place] = of_space.get(place, 0) + units
        assert held == self._held, f"held {self._held}, counted {held}"
        for replica, size in enumerate(held):
            assert size <= self._capacity[replica], "over capacity"
            spaces = list(self._spaces.of(replica))
            seen = sum(ring_length(space, replica, self._root) for space in spaces)
            assert seen == sum(1 for node in self._walk() if node.mask >> replica & 1), "not in a ring"
            for space in spaces:
                known = of_space.get((space, replica), 0)
                assert space is self._nobodys or space.held.get(replica, 0) == known, "held of"
        self._spaces.check_invariants()


def _first(leaf: tuple[int, Node]) -> int:
    return leaf[0]
