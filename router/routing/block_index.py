"""The block index: which replica holds which engine block, as the replicas' own KV events tell.

The counterpart of ``prefix_index`` for replicas that announce what they store and remove. Nothing is guessed
and nothing is evicted here: the engine does that and tells. Blocks are named by 64-bit chained hashes, so a
name stands for its whole prefix and ``match`` is a walk until the first name a replica does not hold.

- **Copies.** vLLM announces every copy of a block, and removes every copy: a block is gone when as many
  copies were removed as were stored.
- **Tiers.** Each medium (GPU, CPU, disk) is kept apart; ``match`` looks at the device unless told otherwise.
- **Expected blocks.** Between the choice of a replica and its event a request's siblings should meet there:
  ``expect`` counts the request's blocks as held until ``settle``. (A running request pins its blocks in the
  engine, so what is expected is not evicted meanwhile.)
- **Bounds.** A replica that seems to hold more on its device than it has room for (``set_capacity``), and
  more than ``max_blocks``, has lost removals on the way: everything it told is forgotten and learned anew
  (``overflows``). So whatever is sent to an engine that tells the truth, nobody's blocks leave the index
  but those the engine evicted. Of slower tiers no more than ``max_blocks`` are kept, further ones are not
  (``unkept``): what is known of the device stays.

Parents are not stored: a chained name already implies its parent. A run whose parent is not held is counted
(``unknown_parents``, the sign of a lost batch) and kept: it can be hit again once its head is back.

::

    name -> replicas as bits      0xa1 -> 0b011      copies {(replica 0, 0xa1): 1 more}
                                  0xb2 -> 0b010
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from replica.contract.block_hash import hash_number
from replica.contract.kv_events import DEVICE_MEDIUM, BlockHash
from router.routing.counted_holders import CountedHolders
from router.routing.replica_bits import bits

MAX_BLOCKS = 1_000_000
"""Per replica on the device, if it has no room for more, and once more in all slower tiers together; 16
million tokens in blocks of 16."""
SLACK = 8
"""An engine's own count of its blocks may leave out some: an eighth more is no sign of lost removals."""
MAX_TIERS = 8
OTHER_MEDIUM = "OTHER"
"""Where media end up when an engine names more of them than ``MAX_TIERS``."""
MASK_64 = (1 << 64) - 1


class BlockIndex:
    """What replicas hold, told by their events; sizes are in blocks.

    >>> index = BlockIndex(replicas=2)
    >>> index.stored(0, [1, 2, 3], parent=None), index.stored(1, [1], parent=None)
    (3, 1)
    >>> index.match([1, 2, 3, 4])
    [3, 1]
    >>> index.stored(0, [3], parent=2)                      # a second copy: nothing new
    0
    >>> index.removed(0, [3]), index.removed(0, [3])        # gone with its last copy
    (0, 1)
    >>> index.match([1, 2, 3, 4])
    [2, 1]
    """

    def __init__(self, replicas: int, max_blocks: int = MAX_BLOCKS) -> None:
        self._replicas = replicas
        self._max_blocks = max_blocks
        self._all = (1 << replicas) - 1
        self._device = CountedHolders(replicas)
        self._tiers: dict[str, CountedHolders] = {DEVICE_MEDIUM: self._device}
        self._expected = CountedHolders(replicas)
        self.unknown_parents = [0] * replicas
        """Runs stored after a block that was not held, by replica."""
        self.unknown_removals = [0] * replicas
        """Removals of what was not held, by replica."""
        self.overflows = [0] * replicas
        """How often too much was told and all of it forgotten, by replica."""
        self.unkept = [0] * replicas
        """Blocks of slower tiers for which there was no room, by replica."""
        self._most = [max_blocks] * replicas
        """Blocks on the device, by replica."""

    def add_replica(self) -> None:
        """Make room for one more replica, holding nothing; its index is the next."""
        self._replicas += 1
        self._all = (1 << self._replicas) - 1
        for holders in (*self._tiers.values(), self._expected):
            holders.add_replica()
        for counts in self._counts:
            counts.append(0)
        self._most.append(self._max_blocks)

    def replica_gone(self, replica: int) -> None:
        """Another replica may get this index: nothing is held, nothing was ever told."""
        self.cleared(replica)
        self._expected.clear(replica)
        for counts in self._counts:
            counts[replica] = 0
        self._most[replica] = self._max_blocks

    def set_capacity(self, replica: int, blocks: int) -> None:
        """``replica`` has room for so many on its device, it says."""
        self._most[replica] = max(self._max_blocks, blocks + blocks // SLACK)

    @property
    def _counts(self) -> tuple[list[int], ...]:
        return self.unknown_parents, self.unknown_removals, self.overflows, self.unkept

    # --- what replicas tell ---------------------------------------------------------------------

    def stored(
        self,
        replica: int,
        hashes: Iterable[BlockHash],
        parent: BlockHash | None,
        medium: str | None = DEVICE_MEDIUM,
        *,
        copies: bool = True,
    ) -> int:
        """``replica`` stored a run of blocks after ``parent``; how many of them it did not hold there.

        ``copies=False``: a block it holds was told of by mistake, this is no second copy.
        """
        tier = self._tier(medium)
        if parent is not None and not self.holds(replica, block_name(parent)):
            self.unknown_parents[replica] += 1
        if not copies:
            hashes = [value for value in hashes if not tier.masks.get(block_name(value), 0) >> replica & 1]
        if tier is not self._device:
            hashes = list(hashes)
            if not self.keeps(replica, len(hashes), medium):
                self.unkept[replica] += len(hashes)
                return 0
        add = tier.add
        new = 0
        for value in hashes:
            new += add(replica, value if type(value) is int and value >= 0 else block_name(value))
        if tier.held[replica] > self._most[replica]:
            self.overflows[replica] += 1
            self.cleared(replica)
        return new

    def removed(self, replica: int, hashes: Iterable[BlockHash], medium: str | None = DEVICE_MEDIUM) -> int:
        """``replica`` removed one copy of each block; how many blocks are gone from that tier with it."""
        tier = self._tier(medium)
        gone = 0
        for value in hashes:
            last = tier.remove(replica, block_name(value))
            if last is None:
                if tier is self._device or not self.unkept[replica]:
                    self.unknown_removals[replica] += 1
            else:
                gone += last
        return gone

    def keeps(self, replica: int, blocks: int, medium: str | None) -> bool:
        """There is room for so many more blocks of ``replica`` in that tier."""
        if medium is None or medium == DEVICE_MEDIUM:
            return True
        slower = sum(tier.held[replica] for tier in self._tiers.values()) - self._device.held[replica]
        return slower + blocks <= self._max_blocks

    def cleared(self, replica: int) -> None:
        """``replica`` holds nothing, in any tier. What is expected stays: it is yet to come. O(blocks)."""
        for tier in self._tiers.values():
            tier.clear(replica)

    # --- what the router expects ----------------------------------------------------------------

    def expect(self, replica: int, names: Iterable[int]) -> None:
        """A request is on its way to ``replica`` and will have these blocks stored."""
        for name in names:
            self._expected.add(replica, name)

    def settle(self, replica: int, names: Iterable[int]) -> None:
        """The request is over: events say what is left of it. ``names`` as they were expected."""
        for name in names:
            self._expected.remove(replica, name)

    # --- questions ------------------------------------------------------------------------------

    def match(self, names: Sequence[int], media: Collection[str] = (DEVICE_MEDIUM,)) -> list[int]:
        """Leading blocks of ``names`` each replica holds or is about to hold, by replica. Reads only.

        A block counts if any of ``media`` has it. Cost: one walk for all replicas, then one per replica over
        what it holds in another tier or is about to.
        """
        tiers = [self._tiers[medium] for medium in media if medium in self._tiers]
        matched = [0] * self._replicas
        for mask, blocks in self._walk(tiers[0].masks, names) if tiers else ():
            for replica in bits(mask):
                matched[replica] = blocks
        beside = tiers[1:]
        if self._expected.masks:
            tiers.append(self._expected)
            beside.append(self._expected)
        if beside:
            sources = [tier.masks for tier in tiers]
            for replica, depth in enumerate(matched):
                if depth < len(names) and any(tier.held[replica] for tier in beside):
                    matched[replica] = _walk_on(replica, depth, names, sources)
        return matched

    def levels(self, names: Sequence[int]) -> list[tuple[int, int]]:
        """``match`` on the device as ``PrefixIndex.levels``: (replicas as bits, blocks), deepest last."""
        if not self._expected.masks:
            return self._walk(self._device.masks, names)
        by_depth: dict[int, int] = {}
        for replica, blocks in enumerate(self.match(names)):
            if blocks:
                by_depth[blocks] = by_depth.get(blocks, 0) | 1 << replica
        return [(mask, blocks) for blocks, mask in sorted(by_depth.items())]

    def _walk(self, masks: dict[int, int], names: Sequence[int]) -> list[tuple[int, int]]:
        levels: list[tuple[int, int]] = []
        alive = self._all
        depth = 0
        for mask, run in groupby(map(masks.get, names)):
            here = 0 if mask is None else mask & alive
            if here != alive:
                if depth:
                    levels.append((alive ^ here, depth))
                alive = here
                if not alive:
                    return levels
            depth += len(list(run))
        if depth:
            levels.append((alive, depth))
        return levels

    def holds(self, replica: int, name: int) -> bool:
        """``replica`` has told that it stored ``name``, in any tier."""
        return any(tier.masks.get(name, 0) >> replica & 1 for tier in self._tiers.values())

    def held(self, replica: int, medium: str = DEVICE_MEDIUM) -> int:
        """Distinct blocks ``replica`` holds in a tier."""
        tier = self._tiers.get(medium)
        return 0 if tier is None else tier.held[replica]

    def names(self, replica: int, medium: str = DEVICE_MEDIUM) -> set[int]:
        """The blocks ``replica`` holds in a tier. O(blocks)."""
        tier = self._tiers.get(medium)
        return set() if tier is None else tier.names(replica)

    def copies(self, replica: int, name: int, medium: str = DEVICE_MEDIUM) -> int:
        """Copies of ``name`` that ``replica`` holds in a tier."""
        tier = self._tiers.get(medium)
        return 0 if tier is None else tier.copies(replica, name)

    def media(self) -> tuple[str, ...]:
        """Tiers that were ever told of."""
        return tuple(self._tiers)

    def expected(self) -> int:
        """Distinct (replica, block) pairs that are expected; 0 when nothing is in flight."""
        return sum(self._expected.held)

    def _tier(self, medium: str | None) -> CountedHolders:
        if medium is None or medium == DEVICE_MEDIUM:
            return self._device
        tier = self._tiers.get(medium)
        if tier is None:
            if len(self._tiers) >= MAX_TIERS:
                medium = OTHER_MEDIUM
            tier = self._tiers.setdefault(medium, CountedHolders(self._replicas))
        return tier

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if masks and counts disagree or a bound is broken. O(blocks)."""
        for tier in (*self._tiers.values(), self._expected):
            tier.check_invariants()
        for replica in range(self._replicas):
            assert self._device.held[replica] <= self._most[replica], "bound of the device"
            assert self.keeps(replica, 0, OTHER_MEDIUM), "bound of slower tiers"


def block_name(value: BlockHash) -> int:
    """The unsigned 64-bit form of a hash as events carry it: a digest, or an integer of either sign."""
    return value & MASK_64 if isinstance(value, int) else hash_number(value)


def _walk_on(replica: int, depth: int, names: Sequence[int], sources: Sequence[dict[int, int]]) -> int:
    """How many leading ``names`` ``replica`` has in any of ``sources``; it has the first ``depth``."""
    lookups = [source.get for source in sources]
    for at in range(depth, len(names)):
        mask = 0
        for lookup in lookups:
            mask |= lookup(names[at], 0)
        if not mask >> replica & 1:
            return at
    return len(names)
