"""The hash-chained prefix cache: match a sequence, adopt what matched, publish what was computed.

Block size 4, pool of 4. The first request computes 10 tokens and publishes its two full blocks; the second
shares 9 tokens, so two blocks; the third is the first again: its last block is not adopted whole, because
one token must be computed to have logits (last-token rule; here position 8 is un-cached anyway).

>>> from replica.sequence import Sequence
>>> cache = PrefixCache(4, block_size=4)
>>> a = Sequence("a", range(10), max_tokens=1)
>>> cache.match(a), cache.adopt(a, []), a.block_table
([], True, [0, 1, 2])
>>> a.computed_tokens = 10; cache.publish(a); cache.release(a)
>>> b = Sequence("b", [*range(9), 99], max_tokens=1)
>>> cache.match(b)
[0, 1]
>>> cache.adopt(b, [0, 1]), b.block_table, b.computed_tokens
(True, [0, 1, 2], 8)
>>> cache.match(Sequence("c", range(8), max_tokens=1))      # 8 tokens fully cached: one block is recomputed
[0]
"""

import sys
from collections.abc import Iterable

from replica.contract.block_hash import block_contents, raw_block_hash, root_hash
from replica.contract.kv_events import BlockHash
from replica.kv_cache.block import Content
from replica.kv_cache.block_pool import BlockPool
from replica.kv_cache.cache import PrefixCounters
from replica.kv_cache.cache_record import CacheRecord
from replica.kv_cache.sequence_pages import RawBlockHash
from replica.kv_cache.stored_events import stored_events
from replica.sequence import Sequence

NEVER = sys.maxsize
"""More tokens than any sequence has."""


class PrefixCache(CacheRecord):
    """Blocks of a fixed pool, shared by sequences with one prefix.

    Life of a sequence here: ``match`` (reads), ``adopt`` (all or nothing), then per step ``extend`` before
    and ``publish`` after the KV is computed, at the end ``release``. Nothing is hittable before ``publish``,
    so an abort leaves no half-filled block behind. ``match`` and ``adopt`` belong together: no other call in
    between.
    """

    repeatable = True

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        enabled: bool = True,
        record_events: bool = False,
        record_evictions: bool = False,
        raw_hash: RawBlockHash = raw_block_hash,
    ) -> None:
        """``blocks`` of ``block_size`` tokens. ``enabled=False``: every request computes its whole prompt.

        ``record_events`` and ``record_evictions``: keep them for ``take_events`` and ``take_evictions``
        (somebody must take them). ``raw_hash`` is replaced in tests only.
        """
        if block_size < 1:
            raise ValueError(f"block_size {block_size}: give at least 1 token")
        super().__init__()
        self.pool = BlockPool(
            blocks, self._events if record_events else None, self._evictions if record_evictions else None
        )
        self.block_size = self.hash_tokens = block_size
        self.enabled = enabled
        self.counters = PrefixCounters()
        self._raw_hash = raw_hash

    @property
    def blocks(self) -> int:
        """Blocks in all."""
        return self.pool.size

    @property
    def free_blocks(self) -> int:
        """Blocks no sequence holds; some of them can still be hit."""
        return self.pool.free_blocks

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""
        return -(-tokens // self.block_size)

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks with the sequence's longest cached prefix, short of its last token.

        Reads only: no reference, no change of the eviction order, no count. Each block is compared with the
        sequence's own tokens and with the identity of the block before it, so the result is right even if
        digests collide.
        """
        if not self.enabled:
            return []
        self._hash_blocks(sequence, sequence.total_tokens // self.block_size)
        if not sequence.reads_cache:
            return []
        limit = min((sequence.total_tokens - 1) // self.block_size, len(sequence.block_hashes))
        return self.pool.walk(sequence.root, sequence.block_hashes, sequence.block_contents, limit)

    def shorten(self, matched: list[int], blocks: int) -> list[int]:
        """The first ``blocks`` blocks of what matched."""
        return matched[:blocks]

    def fits(self, sequence: Sequence, matched: list[int], spare_blocks: int = 0) -> bool:
        """Whether ``adopt`` would succeed: matched blocks that are free now count as taken."""
        new = self.blocks_for(sequence.total_tokens) - len(matched)
        return new + self.pool.idle(matched) + spare_blocks <= self.pool.free_blocks

    def adopt(self, sequence: Sequence, matched: list[int], spare_blocks: int = 0) -> bool:
        """Give a sequence its matched blocks and new ones for every token it knows; False: nothing changed.

        Order matters: count first, hold all matched blocks, only then take new ones, or the new ones could
        be the matched ones. ``spare_blocks`` must stay free.
        """
        if not self.fits(sequence, matched, spare_blocks):
            return False
        self.pool.touch(matched)
        new = self.blocks_for(sequence.total_tokens) - len(matched)
        sequence.block_table = matched + self.pool.take(new)
        self._set_published(sequence, len(matched))
        sequence.computed_tokens = len(matched) * self.block_size
        if self.enabled and sequence.reads_cache:
            self.counters.count(sequence)
        return True

    def hold(self, sequence: Sequence, matched: list[int]) -> None:
        """Hold what matched and nothing else, uncounted, until ``release``: the sequence will not run."""
        self.pool.touch(matched)
        sequence.block_table = list(matched)
        self._set_published(sequence, len(matched))
        sequence.computed_tokens = len(matched) * self.block_size

    def extend(self, sequence: Sequence) -> bool:
        """Make room for every token the sequence knows; False, changing nothing, when blocks are missing."""
        missing = self.blocks_for(sequence.total_tokens) - len(sequence.block_table)
        if missing > self.pool.free_blocks:
            return False
        if missing > 0:
            sequence.block_table += self.pool.take(missing)
        return True

    def take_block(self, sequence: Sequence) -> None:
        """One more block at the end of the table. IndexError when none is free."""
        sequence.block_table += self.pool.take(1)

    def publish(self, sequence: Sequence) -> None:
        """Make those full blocks hittable whose KV is computed (positions below ``computed_tokens``).

        Has nothing to do before ``computed_tokens`` reaches the sequence's ``publish_at``.
        """
        if sequence.computed_tokens < sequence.publish_at:
            return
        start = sequence.published_blocks
        full = sequence.computed_tokens // self.block_size
        self._hash_blocks(sequence, full)
        full = min(full, len(sequence.block_hashes))
        pool = self.pool
        table, hashes, contents = sequence.block_table, sequence.block_hashes, sequence.block_contents
        parent = pool.blocks[table[start - 1]].identity if start else sequence.root
        news = []
        for index in range(start, full):
            news.append(pool.store(table[index], hashes[index], parent, contents[index]))
            parent = pool.blocks[table[index]].identity
        self._set_published(sequence, full)
        if pool.events is not None:
            self._events += stored_events(sequence, hashes, start, news, self.block_size)

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence (finished, aborted or preempted); published ones stay hittable."""
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.published_blocks = 0
        sequence.computed_tokens = 0

    def will_publish(self, owner: Sequence, sequence: Sequence, missing_block: int) -> bool:
        """Whether ``owner``'s prefill ends in a hit for ``sequence`` at ``missing_block``, its first miss.

        Never for the block that holds the sequence's last token, which no hit may cover. Block hashes are
        chained, so an equal hash at an equal place means an equal prefix; if it does not (a collision), who
        waits for it waits in vain and nothing else.
        """
        size = self.block_size
        hashes, owned = sequence.block_hashes, owner.block_hashes
        return (
            missing_block < min(len(hashes), (sequence.total_tokens - 1) // size)
            and missing_block < min(len(owned), owner.total_tokens // size)
            and owned[missing_block] == hashes[missing_block]
            and owner.published_blocks <= missing_block
        )

    def chunk_stop(self, sequence: Sequence, stop: int) -> int:
        """Anywhere: KV can be cut at every position."""
        return stop

    def reset(self) -> bool:
        """Forget every cached block; False, changing nothing, while a sequence holds any block."""
        return self.pool.forget_all()

    def block_hashes(self, sequence: Sequence) -> list[BlockHash]:
        """The chained hashes of the sequence's full blocks, or the ids that name them."""
        self._hash_blocks(sequence, sequence.total_tokens // self.block_size)
        return sequence.block_hashes

    def cached_hashes(self) -> Iterable[BlockHash]:
        """Block hashes of which at least one copy is cached."""
        return self.pool.cached_keys

    def stranded_tokens(self) -> int:
        """Positions that are resident but can never be hit, for want of what comes before. O(blocks)."""
        return self.pool.stranded_blocks() * self.block_size

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless pool, map and the tables of ``sequences`` (all there are) agree."""
        self.pool.check_invariants()
        holders = [0] * self.blocks
        for sequence in sequences:
            table = sequence.block_table
            assert len(set(table)) == len(table), f"{sequence} holds a block twice"
            assert sequence.computed_tokens <= len(table) * self.block_size, sequence
            assert sequence.published_blocks * self.block_size <= sequence.computed_tokens, sequence
            parent = sequence.root
            for index, number in enumerate(table):
                holders[number] += 1
                block = self.pool.blocks[number]
                if index >= sequence.published_blocks:
                    assert block.key is None, f"{sequence} holds {block}, cached before it is computed"
                    continue
                assert block.content == self._content(sequence, index), f"{sequence} holds another's {block}"
                assert block.parent == parent, f"{block} of {sequence} has another prefix"
                parent = block.identity  # type: ignore[assignment]
            if self.enabled:
                full = min(sequence.computed_tokens // self.block_size, len(sequence.block_hashes))
                assert sequence.published_blocks == full, f"{sequence}: computed blocks not published"
        references = [block.references for block in self.pool.blocks]
        references += [0] * (self.pool.size - len(references))
        assert holders == references, "references and tables differ"
        if not self.enabled:
            assert not list(self.pool.cached_keys)

    def _hash_blocks(self, sequence: Sequence, full: int) -> None:
        """Hash those of the first ``full`` blocks that are not hashed yet. Opaque ids need nothing."""
        done = len(sequence.block_hashes)
        if done >= full or sequence.id_block_size is not None:
            return
        contents = block_contents(sequence.token_ids, self.block_size, done, full, sequence.multimodal)
        parent = sequence.chain_end or root_hash(sequence.salt, sequence.adapter)
        raw_hash, hashes = self._raw_hash, sequence.block_hashes
        for content in contents:
            parent = raw_hash(parent, content)
            hashes.append(parent)
        sequence.block_contents += contents
        sequence.chain_end = parent

    def _set_published(self, sequence: Sequence, blocks: int) -> None:
        sequence.published_blocks = blocks
        named = sequence.id_block_size is None or blocks < len(sequence.block_hashes)
        sequence.publish_at = (blocks + 1) * self.block_size if self.enabled and named else NEVER

    def _content(self, sequence: Sequence, index: int) -> Content:
        if sequence.id_block_size is not None:
            return sequence.block_contents[index]
        (content,) = block_contents(
            sequence.token_ids, self.block_size, index, index + 1, sequence.multimodal
        )
        return content
