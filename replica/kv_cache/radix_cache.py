"""The token-level prefix cache: a radix tree of pages, as small as one token each.

Against the block cache: a hit ends where the texts part and not at the block before; a full hit recomputes
one token (or page) instead of a block; content is compared directly, so there is no hash to collide; what is
computed twice is kept once. Sixteen pages of one token; the second request shares three tokens of the first:

>>> cache = RadixCache(16)
>>> a = Sequence("a", [1, 2, 3, 4, 5], max_tokens=1)
>>> cache.adopt(a, cache.match(a)), a.block_table
(True, [0, 1, 2, 3, 4])
>>> a.computed_tokens = 5; cache.publish(a); cache.release(a)
>>> b = Sequence("b", [1, 2, 3, 9], max_tokens=1)
>>> cache.adopt(b, cache.match(b)), b.block_table, b.computed_tokens
(True, [0, 1, 2, 5], 3)
>>> len(cache.match(Sequence("c", [1, 2, 3, 4, 5], max_tokens=1)))      # all cached: one is recomputed
4
"""

from collections.abc import Iterable
from collections.abc import Sequence as Row

from replica.contract.block_hash import raw_block_hash
from replica.contract.kv_events import BlockHash, BlocksRemoved, CacheCleared
from replica.kv_cache.cache import PrefixCounters
from replica.kv_cache.cache_record import CacheRecord
from replica.kv_cache.eviction_order import eviction_order
from replica.kv_cache.prefix_cache import NEVER
from replica.kv_cache.radix_node import Node, Unit, common_length
from replica.kv_cache.radix_tree import NOWHERE, Place, RadixTree
from replica.kv_cache.sequence_pages import RawBlockHash, event_hashes, page_units
from replica.kv_cache.stored_events import stored_events
from replica.sequence import Sequence

WORTH_WAITING_TOKENS = 16
"""A request waits for another's prefill when that gives it at least so many tokens; prompts of one chat
template all begin alike."""


class RadixCache(CacheRecord):
    """Pages of a fixed pool, shared by sequences with one prefix; see ``Cache`` for what each call means.

    Every page is in one of three places::

        free list | a node of the tree (hittable; pinned or evictable) | one sequence's table, unpublished

    A sequence holds its prefix by a pin on the tree node that ends where its published part ends.
    """

    repeatable = True

    def __init__(
        self,
        blocks: int,
        block_size: int = 1,
        *,
        enabled: bool = True,
        record_events: bool = False,
        record_evictions: bool = False,
        event_block_size: int | None = None,
        eviction: str = "lru",
        tail_slack_tokens: int = 0,
        raw_hash: RawBlockHash = raw_block_hash,
    ) -> None:
        """``blocks`` pages of ``block_size`` tokens.

        ``event_block_size``: tokens per block hash in events and evictions, a multiple of the page; default
        one page. ``eviction``: "lru", "slru", "lfu", or "tlru" with ``tail_slack_tokens``, what a returning
        conversation may recompute within its latency budget less what it brings (see ``eviction_order``).
        """
        if blocks < 1 or block_size < 1:
            raise ValueError(f"{blocks} pages of {block_size} tokens: give at least 1 of each")
        hash_units, rest = divmod(event_block_size or block_size, block_size)
        if rest or hash_units < 1:
            raise ValueError(
                f"event_block_size {event_block_size}: give a multiple of {block_size}, the page"
            )
        super().__init__()
        self.blocks = blocks
        self.block_size = block_size
        self.enabled = enabled
        self.counters = PrefixCounters()
        self._raw_hash = raw_hash
        self._records_events = record_events
        self._records_hashes = record_events or record_evictions
        self._hash_units = hash_units
        self.hash_tokens = hash_units * block_size
        order = eviction_order(eviction, tail_slack_tokens // block_size)
        self.tree = RadixTree(order, hash_units, self._evictions if record_evictions else None)
        self._free = self._whole_pool()
        self._ends: dict[Sequence, Node] = {}
        """The node at which each holder's published part ends."""

    @property
    def free_blocks(self) -> int:
        """Pages no sequence holds; those in the tree can still be hit."""
        return len(self._free) + self.tree.evictable

    def blocks_for(self, tokens: int) -> int:
        """Pages that hold ``tokens`` positions."""
        return -(-tokens // self.block_size)

    def match(self, sequence: Sequence) -> Place:
        """The sequence's longest cached prefix in whole pages, short of its last token. Reads only.

        Tokens are compared, not hashes. Where a match that ends inside an edge is adopted, the edge is split.
        """
        if not self.enabled or not sequence.reads_cache:
            return NOWHERE
        limit = (sequence.total_tokens - 1) // self.block_size
        units = self._units(sequence, limit)
        return self.tree.locate(self._namespace(sequence), units, min(limit, len(units)))

    def shorten(self, matched: Place, blocks: int) -> Place:
        """The first ``blocks`` pages of what matched."""
        return self.tree.shorten(matched, blocks)

    def fits(self, sequence: Sequence, matched: Place, spare_blocks: int = 0) -> bool:
        """Whether ``adopt`` would succeed: matched pages that nobody pins now count as taken."""
        new = self.blocks_for(sequence.total_tokens) - len(matched)
        return new + self.tree.idle(matched) + spare_blocks <= self.free_blocks

    def adopt(self, sequence: Sequence, matched: Place, spare_blocks: int = 0) -> bool:
        """Hold what matched and take pages for every other token known; False: nothing changed."""
        if not self.fits(sequence, matched, spare_blocks):
            return False
        self.hold(sequence, matched)
        self.tree.count_hit(self._ends[sequence])
        sequence.block_table += self._take(self.blocks_for(sequence.total_tokens) - len(matched))
        if self.enabled and sequence.reads_cache:
            self.counters.count(sequence)
        return True

    def hold(self, sequence: Sequence, matched: Place) -> None:
        """Hold what matched and nothing else, uncounted, until ``release``: the sequence will not run."""
        node = self.tree.keep(self._namespace(sequence), matched)
        self._ends[sequence] = node
        sequence.block_table = self.tree.slots_to(node)
        self._set_published(sequence, len(matched))
        sequence.computed_tokens = len(matched) * self.block_size

    def extend(self, sequence: Sequence) -> bool:
        """Room for every token the sequence knows; False, changing nothing, when pages are missing."""
        missing = self.blocks_for(sequence.total_tokens) - len(sequence.block_table)
        if missing > self.free_blocks:
            return False
        if missing > 0:
            sequence.block_table += self._take(missing)
        return True

    def take_block(self, sequence: Sequence) -> None:
        """One more page at the end of the table. IndexError when none is free."""
        sequence.block_table += self._take(1)

    def publish(self, sequence: Sequence) -> None:
        """Make whole pages below ``computed_tokens`` hittable.

        What another sequence published in the meantime stays, this one's copy is freed and its table points
        to the other's pages.
        """
        if sequence.computed_tokens < sequence.publish_at:
            return
        at, full = sequence.published_blocks, sequence.computed_tokens // self.block_size
        units = self._units(sequence, full)
        full = min(full, len(units))
        table, tree = sequence.block_table, self.tree
        node = self._ends[sequence]
        while at < full and (child := node.children.get(units[at])) is not None:
            same = common_length(child.units, units, at, full)
            if same < len(child.units):
                child = tree.split(child, same)
            tree.keep_child(child)
            self._free += table[at : at + same]
            table[at : at + same] = child.slots
            at += same
            node = child
        if at < full:
            node = self._grow(node, sequence, at, full, units)
        self._ends[sequence] = node
        self._set_published(sequence, full)

    def release(self, sequence: Sequence) -> None:
        """Take all pages from a sequence (finished, aborted or preempted); published ones stay hittable."""
        self._free += sequence.block_table[sequence.published_blocks :]
        node = self._ends.pop(sequence, None)
        if node is not None:
            self.tree.unpin(node)
        sequence.block_table = []
        sequence.published_blocks = 0
        sequence.computed_tokens = 0

    def will_publish(self, owner: Sequence, sequence: Sequence, missing_block: int) -> bool:
        """Whether ``owner``'s prefill ends in a hit for ``sequence`` at ``missing_block``, its first miss.

        Only if the hit is worth it (WORTH_WAITING_TOKENS); with opaque ids any page is.
        """
        if self._namespace(owner) != self._namespace(sequence) or owner.published_blocks > missing_block:
            return False
        gain = 1 if sequence.id_block_size is not None else self.blocks_for(WORTH_WAITING_TOKENS)
        stop = missing_block + gain
        last, owned = (sequence.total_tokens - 1) // self.block_size, owner.total_tokens // self.block_size
        wanted, theirs = self._units(sequence, last), self._units(owner, owned)
        if stop > min(last, owned, len(wanted), len(theirs)):
            return False
        return wanted[missing_block:stop] == theirs[missing_block:stop] and (
            wanted[:missing_block] == theirs[:missing_block]
        )

    def chunk_stop(self, sequence: Sequence, stop: int) -> int:
        """Anywhere: KV can be cut at every position."""
        return stop

    def reset(self) -> bool:
        """Forget every cached page; False, changing nothing, while a sequence holds any."""
        if self._ends:
            return False
        self.tree.clear()
        self._free = self._whole_pool()
        if self._records_events:
            self._events.append(CacheCleared())
        return True

    def block_hashes(self, sequence: Sequence) -> Row[BlockHash]:
        """The chained hashes of the sequence's full event blocks, or the ids that name them."""
        count = sequence.total_tokens // self.hash_tokens
        return event_hashes(sequence, self.hash_tokens, self._hash_units, count, self._raw_hash)

    def cached_hashes(self) -> Iterable[BlockHash]:
        """Hashes of the event blocks that are in the tree; none unless events or evictions are recorded."""
        return self.tree.hash_counts.keys()

    def stranded_tokens(self) -> int:
        """Positions in the tree that no walk from a root reaches: 0, by the shape of a tree. O(nodes)."""
        reachable = sum(len(node.units) for node in self.tree.walk())
        return (self.tree.cached - reachable) * self.block_size

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless every page has one owner and tables, tree and pins agree."""
        self.tree.check_invariants()
        assert self.stranded_tokens() == 0
        owned = [*self._free, *(slot for node in self.tree.walk() for slot in node.slots)]
        pins: dict[Node, int] = {}
        holders = list(sequences)
        assert set(self._ends) == {s for s in holders if s in self._ends or s.block_table}
        for sequence in holders:
            table, published = sequence.block_table, sequence.published_blocks
            owned += table[published:]
            assert sequence.computed_tokens <= len(table) * self.block_size, sequence
            if sequence not in self._ends:
                continue
            end = self._ends[sequence]
            assert end.end == published, f"{sequence} is pinned at {end}"
            assert self.tree.slots_to(end) == table[:published], f"{sequence}: table and tree differ"
            way = list(self.tree.path(end))
            units: list[Unit] = []
            for node in reversed(way):
                units += node.units
            full = sequence.computed_tokens // self.block_size
            mine = self._units(sequence, full)
            assert list(mine[:published]) == units, f"{sequence} holds another's prefix"
            if self.enabled:
                assert published == min(full, len(mine)), f"{sequence}: computed pages not published"
            root = way[-1].parent if way else end
            assert root is self.tree.roots[self._namespace(sequence)], f"{sequence}: another namespace"
            for node in [*way, root]:
                pins[node] = pins.get(node, 0) + 1
        for node in self.tree.walk():
            assert node.pins == pins.get(node, 0), f"{node} has {pins.get(node, 0)} holders"
        assert sorted(owned) == list(range(self.blocks)), "a page has no owner or two"

    def _take(self, count: int) -> list[int]:
        """``count`` pages: never used or unpublished ones first, then evicted ones."""
        if count <= 0:
            return []
        free = self._free
        missing = count - len(free)
        if missing > 0:
            pages = free[::-1] + self.tree.evict(missing)
            free.clear()
            if self.tree.removed:
                if self._records_events:
                    self._events.append(BlocksRemoved(tuple(self.tree.removed)))
                self.tree.removed.clear()
            return pages
        pages = free[: -count - 1 : -1]
        del free[-count:]
        return pages

    def _units(self, sequence: Sequence, pages: int) -> Row[Unit]:
        return page_units(sequence, self.block_size, pages)

    def _grow(self, node: Node, sequence: Sequence, start: int, stop: int, units: Row[Unit]) -> Node:
        """Give pages ``start .. stop - 1`` of the sequence to the tree, and tell; where they end."""
        first, last = start // self._hash_units, stop // self._hash_units
        hashes: Row[BlockHash] = ()
        if self._records_hashes and first < last:
            hashes = event_hashes(sequence, self.hash_tokens, self._hash_units, last, self._raw_hash)
            if self._records_events:
                news: list[bool] = []
                for block in range(first, last):
                    known = hashes[block] in self.tree.hash_counts or hashes[block] in hashes[first:block]
                    news.append(not known)
                self._events += stored_events(sequence, hashes, first, news, self.hash_tokens)
        return self.tree.grow(node, units[start:stop], sequence.block_table[start:stop], hashes[first:last])

    def _set_published(self, sequence: Sequence, pages: int) -> None:
        sequence.published_blocks = pages
        named = sequence.id_block_size is None or pages < len(sequence.block_contents)
        sequence.publish_at = (pages + 1) * self.block_size if self.enabled and named else NEVER

    def _namespace(self, sequence: Sequence) -> tuple[bytes, bool]:
        return (sequence.root, sequence.id_block_size is not None)

    def _whole_pool(self) -> list[int]:
        """All pages; the last of the list is taken first."""
        return list(range(self.blocks - 1, -1, -1))
