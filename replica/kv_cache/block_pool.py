"""Who owns which block: the free queue, reference counts, and the map from key to cached blocks.

A block is *free* (in nobody's table) or *held*; independently it is *cached* (hittable) or not. Order of
reuse: un-cached blocks first, then the longest free; within one release tail before head, so that a prefix
outlives its continuations. (vLLM's rules; un-cached blocks in front since 2026.)

Five blocks; a sequence held 0, 1 and 2, of which 0 and 1 are cached and 2 is a partial tail:

>>> pool = BlockPool(5)
>>> pool.take(3)
[0, 1, 2]
>>> first = pool.store(0, b"k0", b"root", b"tokens 0..15")
>>> _ = pool.store(1, b"k1", pool.blocks[0].identity, b"tokens 16..31")
>>> pool.release([0, 1, 2])
>>> [block.number for block in pool.free]       # the partial tail, the never used, deep before shallow
[2, 3, 4, 1, 0]
>>> pool.walk(b"root", [b"k0", b"k1"], [b"tokens 0..15", b"tokens 16..31"], 2)      # free, still hittable
[0, 1]
>>> pool.walk(b"root", [b"k0"], [b"other tokens, colliding key"], 1)
[]
"""

from collections import Counter
from collections.abc import Iterable, Sequence

from replica.contract.kv_events import BlockHash, BlocksRemoved, CacheCleared, CacheEvent
from replica.kv_cache.block import Block, Content, Identity
from replica.kv_cache.cache import Evicted
from replica.kv_cache.free_queue import FreeQueue

MADE_AT_ONCE = 1_024
"""A pool is made in pieces of so many blocks."""


class BlockPool:
    """``blocks`` numbered from 0. Removals are appended to the lists ``events`` and ``evicted``, if given.

    A *key* finds candidates; a hit is a candidate whose (parent identity, content) equals what is asked for.
    Identities are given so that equal identity means equal prefix, by induction from the root: whatever the
    hash function, a walk never returns a block of another prefix.
    """

    __slots__ = ("_by_key", "_identities", "_plain", "blocks", "events", "evicted", "free", "size")

    def __init__(
        self, blocks: int, events: list[CacheEvent] | None = None, evicted: list[Evicted] | None = None
    ) -> None:
        if blocks < 1:
            raise ValueError(f"a pool of {blocks} blocks: give at least 1")
        self.size = blocks
        """Blocks in all."""
        self.blocks = [Block(number) for number in range(min(blocks, MADE_AT_ONCE))]
        """Those that were made: all, or so many as were ever needed at once, and a few."""
        self.free = FreeQueue(self.blocks)
        self._plain = len(self.blocks)  # free blocks in front of where those not made yet belong
        self.events = events
        self.evicted = evicted
        self._by_key: dict[BlockHash, Block] = {}
        self._identities = 0

    # Cached blocks

    @property
    def cached_keys(self) -> Iterable[BlockHash]:
        """Every key that has at least one cached block."""
        return self._by_key.keys()

    def walk(
        self, root: Identity, keys: Sequence[BlockHash], contents: Sequence[Content], limit: int
    ) -> list[int]:
        """Blocks of the longest cached prefix, at most ``limit``, each one verified. Reads only."""
        by_key = self._by_key
        parent = root
        found = []
        for index in range(limit):
            block = by_key.get(keys[index])
            content = contents[index]
            while block is not None and (block.content != content or block.parent != parent):
                block = block.twin
            if block is None:
                break
            found.append(block.number)
            parent = block.identity
        return found

    def store(self, number: int, key: BlockHash, parent: Identity, content: Content) -> bool:
        """Make a held block hittable; True when no other block has this key.

        A second copy of a prefix is kept beside the first (a table is never rewritten) and shares its
        identity; the oldest copy is found first.
        """
        block = self.blocks[number]
        if block.references < 1 or block.key is not None:
            raise ValueError(f"{block} cannot be stored: it must be held and not yet cached")
        block.key = key
        block.parent = parent
        block.content = content
        first = self._by_key.setdefault(key, block)
        if first is block:
            self._identities += 1
            block.identity = self._identities
            return True
        last = first
        identity: Identity | None = None
        while True:
            if last.parent == parent and last.content == content:
                identity = last.identity
            if last.twin is None:
                break
            last = last.twin
        last.twin = block
        if identity is None:
            self._identities += 1
            identity = self._identities
        block.identity = identity
        return False

    def forget_all(self) -> bool:
        """Forget every cached block; False, changing nothing, while a block is held."""
        if len(self.free) != len(self.blocks):
            return False
        for block in self.blocks:
            block.key = block.twin = None
        self._by_key.clear()
        if self.events is not None:
            self.events.append(CacheCleared())
        return True

    # Held and free blocks

    @property
    def free_blocks(self) -> int:
        """Blocks that no table has, those not made yet among them."""
        return len(self.free) + self.size - len(self.blocks)

    def take(self, count: int) -> list[int]:
        """The next ``count`` free blocks, held once; what they cached is gone. IndexError if too few."""
        numbers = []
        removed: list[BlockHash] = []
        for block in self._next(count):
            block.references = 1
            if block.key is not None and (key := self._uncache(block)) is not None:
                removed.append(key)
                if self.evicted is not None:
                    self.evicted.append(Evicted(key, (block.number,)))
            numbers.append(block.number)
        if removed and self.events is not None:
            self.events.append(BlocksRemoved(tuple(removed)))
        return numbers

    def _next(self, count: int) -> list[Block]:
        """The first ``count`` free blocks, out of the queue; the never used are made when it is their turn.

        A large pool would otherwise spend seconds and megabytes on blocks that nobody ever uses.
        """
        if len(self.blocks) == self.size:
            return self.free.take(count)
        if count > self.free_blocks:
            raise IndexError(f"{count} free blocks wanted, {self.free_blocks} there")
        if count > self._plain:
            # Released un-cached blocks go first, then the never used, then the cached ones.
            taken = self.free.take(self._plain)
            self._plain = 0
            first = len(self.blocks)
            made = [Block(first + i) for i in range(min(max(count, MADE_AT_ONCE), self.size - first))]
            self.blocks += made
            self.free.prepend(made)
            self._plain = len(made)
            return taken + self._next(count - len(taken))
        self._plain -= count
        return self.free.take(count)

    def touch(self, numbers: Iterable[int]) -> None:
        """Hold blocks once more; free ones leave the free queue (and come back as the youngest)."""
        for number in numbers:
            block = self.blocks[number]
            if block.references == 0:
                self.free.remove(block)
            block.references += 1

    def release(self, numbers: Sequence[int]) -> None:
        """Hold the blocks of one table once less. Raises ValueError for a block nobody holds."""
        cached: list[Block] = []
        uncached: list[Block] = []
        for number in reversed(numbers):
            block = self.blocks[number]
            if block.references < 1:
                raise ValueError(f"{block} released but nobody holds it")
            block.references -= 1
            if block.references == 0:
                (uncached if block.key is None else cached).append(block)
        self._plain += len(uncached)
        self.free.prepend(uncached)
        self.free.append(cached)

    def idle(self, numbers: Iterable[int]) -> int:
        """How many of these blocks are free."""
        blocks = self.blocks
        return sum(1 for number in numbers if blocks[number].references == 0)

    def _uncache(self, block: Block) -> BlockHash | None:
        """Take a block out of the map; its key when it was the last with it, else None."""
        key = block.key
        assert key is not None
        first = self._by_key[key]
        gone = None
        if first is not block:
            before = first
            while before.twin is not block:
                assert before.twin is not None
                before = before.twin
            before.twin = block.twin
        elif block.twin is not None:
            self._by_key[key] = block.twin
        else:
            del self._by_key[key]
            gone = key
        block.key = block.twin = None
        return gone

    # Checks

    def stranded_blocks(self) -> int:
        """Cached blocks that no walk can reach, because some block of the prefix before them is gone.

        Tail-before-head reuse keeps this at 0. O(pool).
        """
        cached = 0
        after: dict[Identity, list[Block]] = {}
        for block in self.blocks:
            if block.key is not None:
                cached += 1
                after.setdefault(block.parent, []).append(block)
        reached = [block for parent, blocks in after.items() if isinstance(parent, bytes) for block in blocks]
        walked = {block.parent for block in reached}
        for block in reached:  # grows as it is read
            if block.identity not in walked:
                walked.add(block.identity)
                reached += after.get(block.identity, ())
        return cached - len(reached)

    def check_invariants(self) -> None:
        """Raise AssertionError unless queue, counts, map and identities agree. O(pool); for tests."""
        self.free.check_invariants()
        queued = Counter(block.number for block in self.free)
        for block in self.blocks:
            assert block.references >= 0, block
            assert queued[block.number] == (1 if block.references == 0 else 0), block
        listed: Counter[int] = Counter()
        for key, first in self._by_key.items():
            twin: Block | None = first
            while twin is not None:
                assert twin.key == key, (twin, key)
                listed[twin.number] += 1
                twin = twin.twin
        meaning: dict[Identity, tuple[Identity, Content]] = {}
        identity_of: dict[tuple[Identity, Content], Identity] = {}
        for block in self.blocks:
            assert listed[block.number] == (0 if block.key is None else 1), block
            if block.key is None:
                assert block.twin is None, block
                continue
            named = (block.parent, block.content)
            assert meaning.setdefault(block.identity, named) == named, "one identity, two prefixes"
            assert identity_of.setdefault(named, block.identity) == block.identity, (
                "one prefix, two identities"
            )
        assert self.stranded_blocks() == 0, "a prefix was reused before its continuation"
