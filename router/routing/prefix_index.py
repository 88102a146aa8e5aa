"""The prefix index: what the router believes each replica's prefix cache holds, bounded per replica.

One radix tree over chained block keys serves all replicas. A node is a run of blocks; ``holders`` says
which replicas hold it and when each last used it. Because a key names its whole prefix, a run matches if
its last key does, and a partial match is found by bisection. A replica that holds a node holds all nodes
above it, so what it holds is a tree too, and its least recently used leaves are forgotten first: tails
before heads, as engines do.

::

    root ── [system prompt] ──┬── [chat A: turns 1-3]     holders {0: t=41}
            holders {0, 1}    └── [chat B: turn 1]        holders {1: t=37}
"""

from array import array
from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heappush

from router.routing.prompt_blocks import BlockLayout


class _Node:
    __slots__ = ("children", "holders", "holding_children", "keys", "mask", "parent", "queued", "start")

    def __init__(self, keys: "array[int]", start: int, parent: "_Node | None") -> None:
        self.keys = keys
        self.start = start  # blocks before this node
        self.parent = parent
        self.children: dict[int, _Node] = {}
        self.holders: dict[int, int] = {}  # replica -> tick of last use
        self.holding_children: dict[int, int] = {}  # replica -> how many children it holds
        self.mask = 0  # holders as bits
        self.queued = 0  # replicas in whose eviction heap this node stands, as bits

    @property
    def stop(self) -> int:
        return self.start + len(self.keys)


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
        self._end = layout.end
        self._root = _Node(array("Q"), 0, None)
        self._tick = 0
        self._capacity: list[int] = []
        self._held: list[int] = []
        self._heaps: list[list[tuple[int, int, _Node]]] = []
        self._pushes = 0
        self._all = 0
        for _ in range(replicas):
            self.add_replica(capacity)

    def add_replica(self, capacity: int) -> int:
        """Make room for one more replica, holding nothing; returns its index."""
        self._capacity.append(capacity)
        self._held.append(0)
        self._heaps.append([])
        self._all = (1 << len(self._held)) - 1
        return len(self._held) - 1

    def held(self, replica: int) -> int:
        """Units ``replica`` is believed to hold."""
        return self._held[replica]

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
            common = _common(child.keys, keys, depth, length)
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

    def insert(self, replica: int, keys: Sequence[int]) -> None:
        """``replica`` is about to hold all of ``keys``; its least recently used tails make room."""
        length = len(keys)
        if not length:
            return
        self._tick += 1
        tick, bit = self._tick, 1 << replica
        node, depth = self._root, 0
        while depth < length:
            child = node.children.get(keys[depth])
            if child is None:
                node = self._append(node, replica, keys, depth, tick)
                break
            common = _common(child.keys, keys, depth, length)
            if common < len(child.keys):
                if common + depth == length and child.mask & bit:
                    # The prompt ends inside what the replica holds: a use of the run, nothing new.
                    child.holders[replica] = tick
                    node = child
                    break
                child = self._split(child, common)
            if not child.mask & bit:
                self._hold(child, replica, tick)
            else:
                child.holders[replica] = tick
            depth += common
            node = child
        self._queue_if_leaf(node, replica)
        if self._held[replica] > self._capacity[replica]:
            self._evict(replica)

    def truncate(self, replica: int, keys: Sequence[int], blocks: int) -> None:
        """``replica`` turned out to hold only the first ``blocks`` of ``keys``: forget what follows."""
        node, depth, length = self._root, 0, len(keys)
        bit = 1 << replica
        while depth < length:
            child = node.children.get(keys[depth])
            if child is None or not child.mask & bit:
                return
            common = _common(child.keys, keys, depth, length)
            if depth + common > blocks:
                if depth < blocks:
                    child = self._split(child, blocks - depth)
                    # What is forgotten stands below the split, on the path of ``keys``.
                    node, depth = child, blocks
                    continue
                self._forget_subtree(child, replica)
                self._queue_if_leaf(node, replica)
                return
            if common < len(child.keys):
                return
            depth += common
            node = child

    def clear(self, replica: int) -> None:
        """``replica`` holds nothing any more."""
        for child in [c for c in self._root.children.values() if c.mask >> replica & 1]:
            self._forget_subtree(child, replica)
        for _, _, node in self._heaps[replica]:
            node.queued &= ~(1 << replica)
        self._heaps[replica].clear()

    def chains(self, replica: int) -> Iterator[Sequence[int]]:
        """Key chains that make up all ``replica`` holds, the least recently used first.

        The index may change meanwhile: what is gone by then is left out. Cost: O(leaves) at the start, then
        O(blocks) for each chain.
        """
        bit = 1 << replica
        leaves = [node for _, _, node in self._heaps[replica] if node.mask & bit]
        leaves.sort(key=lambda node: node.holders[replica])

        def walk() -> Iterator[Sequence[int]]:
            for leaf in leaves:
                if leaf.parent is None or not leaf.mask & bit:
                    continue
                runs = []
                node: _Node | None = leaf
                while node is not None and node is not self._root:
                    runs.append(node.keys)
                    node = node.parent
                yield [key for run in reversed(runs) for key in run]

        return walk()

    def nodes(self) -> int:
        """Nodes in the tree, for size reports. O(nodes)."""
        return sum(1 for _ in self._walk())

    # --- the tree -------------------------------------------------------------------------------

    def _append(self, parent: _Node, replica: int, keys: Sequence[int], depth: int, tick: int) -> _Node:
        """Blocks from ``depth`` on are new to the tree: grow ``parent`` if it is this replica's own leaf."""
        bit = 1 << replica
        if parent is not self._root and parent.mask == bit and not parent.children:
            parent.keys.extend(keys[depth:])
            parent.holders[replica] = tick
            self._held[replica] += self._end(len(keys)) - self._end(depth)
            return parent
        node = _Node(array("Q", keys[depth:]), depth, parent)
        parent.children[keys[depth]] = node
        self._hold(node, replica, tick)
        return node

    def _hold(self, node: _Node, replica: int, tick: int) -> None:
        node.holders[replica] = tick
        node.mask |= 1 << replica
        self._held[replica] += self._end(node.stop) - self._end(node.start)
        parent = node.parent
        if parent is not None and parent is not self._root:
            parent.holding_children[replica] = parent.holding_children.get(replica, 0) + 1

    def _split(self, node: _Node, blocks: int) -> _Node:
        """Cut ``node`` after ``blocks`` blocks; the new upper part is returned, ``node`` is the tail."""
        parent = node.parent
        assert parent is not None and 0 < blocks < len(node.keys)
        upper = _Node(node.keys[:blocks], node.start, parent)
        upper.holders = dict(node.holders)
        upper.mask = node.mask
        upper.holding_children = dict.fromkeys(node.holders, 1)
        parent.children[upper.keys[0]] = upper
        node.keys = node.keys[blocks:]
        node.start += blocks
        node.parent = upper
        upper.children[node.keys[0]] = node
        return upper

    def _release(self, node: _Node, replica: int) -> None:
        """``replica`` no longer holds ``node``, of whose children it holds none."""
        parent = node.parent
        assert parent is not None and not node.holding_children.get(replica)
        del node.holders[replica]
        node.mask &= ~(1 << replica)
        self._held[replica] -= self._end(node.stop) - self._end(node.start)
        if parent is not self._root:
            left = parent.holding_children[replica] - 1
            if left:
                parent.holding_children[replica] = left
            else:
                del parent.holding_children[replica]
        if not node.mask:
            del parent.children[node.keys[0]]
            node.parent = None
            self._merge_only_child(parent)

    def _merge_only_child(self, node: _Node) -> None:
        """Undo a split that no longer parts anything: one child with the very same holders."""
        if node is self._root or len(node.children) != 1:
            return
        (child,) = node.children.values()
        if child.mask != node.mask or node.parent is None:
            return
        # The child stays: eviction heaps may point at it.
        child.keys = node.keys + child.keys
        child.start = node.start
        child.parent = node.parent
        node.parent.children[child.keys[0]] = child
        node.parent = None

    def _forget_subtree(self, top: _Node, replica: int) -> None:
        bit = 1 << replica
        order, stack = [], [top]
        while stack:
            node = stack.pop()
            order.append(node)
            stack.extend(child for child in node.children.values() if child.mask & bit)
        for node in reversed(order):
            if node.parent is not None and node.mask & bit:
                self._release(node, replica)

    # --- eviction -------------------------------------------------------------------------------

    def _queue_if_leaf(self, node: _Node, replica: int) -> None:
        bit = 1 << replica
        if node is self._root or not node.mask & bit or node.queued & bit:
            return
        if node.holding_children.get(replica):
            return
        node.queued |= bit
        self._pushes += 1
        heappush(self._heaps[replica], (node.holders[replica], self._pushes, node))

    def _evict(self, replica: int) -> None:
        heap, bit, end = self._heaps[replica], 1 << replica, self._end
        capacity = self._capacity[replica]
        while (excess := self._held[replica] - capacity) > 0:
            if not heap:
                self._rebuild_heap(replica)
                if not heap:
                    return
            tick, _, node = heappop(heap)
            node.queued &= ~bit
            if node.parent is None or not node.mask & bit or node.holding_children.get(replica):
                continue
            if node.holders[replica] != tick:  # used since it was queued
                self._queue_if_leaf(node, replica)
                continue
            keep = len(node.keys)
            stop = end(node.stop)
            while keep and stop - end(node.start + keep) < excess:
                keep -= 1
            upper = self._split(node, keep) if keep else node.parent
            self._release(node, replica)
            if keep and upper.parent is None:
                continue  # merged away: its tail was the last holder's
            self._queue_if_leaf(upper, replica)

    def _rebuild_heap(self, replica: int) -> None:
        bit = 1 << replica
        heap = self._heaps[replica]
        for node in self._walk():
            if node.mask & bit and not node.holding_children.get(replica):
                node.queued |= bit
                self._pushes += 1
                heap.append((node.holders[replica], self._pushes, node))
        heapify(heap)

    def _walk(self) -> Iterator[_Node]:
        stack = list(self._root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if counts, masks or the tree's shape disagree. O(everything)."""
        held = [0] * len(self._held)
        for node in self._walk():
            assert node.keys and node.mask, "an empty node"
            assert node.mask == sum(1 << r for r in node.holders), "mask and holders differ"
            parent = node.parent
            assert parent is not None and parent.children[node.keys[0]] is node, "parent link"
            if parent is not self._root:
                assert node.start == parent.stop, "start"
                assert node.mask & ~parent.mask == 0, "a child is held where its parent is not"
            for replica in node.holders:
                held[replica] += self._end(node.stop) - self._end(node.start)
                holding = sum(1 for c in node.children.values() if replica in c.holders)
                assert holding == node.holding_children.get(replica, 0), "holding_children"
                if not holding:
                    assert node.queued >> replica & 1, "a leaf that could never be evicted"
        assert held == self._held, f"held {self._held}, counted {held}"
        for replica, size in enumerate(held):
            assert size <= self._capacity[replica], "over capacity"


def _common(run: "array[int]", keys: Sequence[int], depth: int, length: int) -> int:
    """How many keys of ``run`` equal those of ``keys`` from ``depth``; the first is known to. Bisects."""
    most = min(len(run), length - depth)
    if run[most - 1] == keys[depth + most - 1]:
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == keys[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
