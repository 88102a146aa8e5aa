"""What a prefix cache offers the scheduler; the block cache and the radix tree both satisfy it.

A *block* is the unit of KV memory that a table entry names: ``block_size`` positions. The radix tree calls it
a page and may have it as small as one token.

Life of a sequence::

    match (reads) -> adopt (all or nothing) -> per step: extend, run, publish -> release
                  -> hold (keeps a cached prefix without running) ............ -> release

``match`` and ``adopt`` (or ``hold``) belong together: no other call in between. Nothing is hittable before
``publish``, and then only positions below the sequence's ``computed_tokens``.
"""

from collections.abc import Iterable, Sized
from collections.abc import Sequence as Row
from dataclasses import dataclass
from typing import Protocol, TypeVar

from replica.contract.kv_events import BlockHash, CacheEvent
from replica.sequence import Sequence

Matched = TypeVar("Matched", bound=Sized)
"""What ``match`` found; its length is a number of blocks."""


@dataclass(slots=True)
class PrefixCounters:
    """Tokens looked up and found, counted at admission; a resumed sequence's own blocks are no hits.

    >>> counters = PrefixCounters()
    >>> a = Sequence("a", range(10), max_tokens=4)
    >>> a.computed_tokens = 8                        # adopted with a hit of 8
    >>> counters.count(a); a.preemptions = 1; counters.count(a)
    >>> counters
    PrefixCounters(queried_tokens=10, hit_tokens=8, resumed_queried_tokens=10, resumed_hit_tokens=8)
    """

    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0

    def count(self, sequence: Sequence) -> None:
        """A sequence was adopted; its ``computed_tokens`` are what was found."""
        if sequence.preemptions == 0:
            sequence.cached_tokens = sequence.computed_tokens
            self.queried_tokens += sequence.total_tokens
            self.hit_tokens += sequence.computed_tokens
        else:
            self.resumed_queried_tokens += sequence.total_tokens
            self.resumed_hit_tokens += sequence.computed_tokens


@dataclass(frozen=True, slots=True)
class Evicted:
    """A block hash that left the device, and the memory in which its KV still lies, until it is written."""

    block_hash: BlockHash
    blocks: tuple[int, ...]
    """Numbers as in a block table, in order of position; one, unless a hash covers several small pages."""


class Cache(Protocol[Matched]):
    """One replica's prefix cache. All methods are synchronous and keep no clock."""

    block_size: int
    """Positions in a block."""
    enabled: bool
    """False: nothing is ever matched or published."""
    counters: PrefixCounters
    repeatable: bool
    """A step that failed can be run again as it is. KV is simply written again; a recurrent state is not."""
    hash_tokens: int
    """Tokens one block hash stands for, in events, evictions and ``block_hashes``."""

    @property
    def blocks(self) -> int:
        """Blocks in all."""

    @property
    def free_blocks(self) -> int:
        """Blocks that no sequence holds; some of them can still be hit."""

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` positions."""

    def match(self, sequence: Sequence) -> Matched:
        """The sequence's longest cached prefix in whole blocks, short of its last token. Reads only."""

    def fits(self, sequence: Sequence, matched: Matched, spare_blocks: int = 0) -> bool:
        """Whether ``adopt`` would succeed."""

    def adopt(self, sequence: Sequence, matched: Matched, spare_blocks: int = 0) -> bool:
        """Hold what matched and take blocks for every other token known; False: nothing changed.

        ``spare_blocks`` must stay free. Sets ``block_table``, ``computed_tokens``, and counts.
        """

    def hold(self, sequence: Sequence, matched: Matched) -> None:
        """Hold what matched and nothing else, uncounted, until ``release``: the sequence will not run."""

    def extend(self, sequence: Sequence) -> bool:
        """Room for every token the sequence knows; False, changing nothing, when blocks are missing."""

    def take_block(self, sequence: Sequence) -> None:
        """One more block at the end of the table. IndexError when none is free."""

    def publish(self, sequence: Sequence) -> None:
        """Make whole blocks below ``computed_tokens`` hittable.

        Has nothing to do before ``computed_tokens`` reaches ``publish_at``. May exchange published entries
        of ``block_table`` for blocks with the same KV, so no batch may be in flight.
        """

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence (finished, aborted or preempted); published ones stay hittable."""

    def will_publish(self, owner: Sequence, sequence: Sequence, missing_block: int) -> bool:
        """Whether ``owner``'s prefill ends in a hit for ``sequence`` at ``missing_block``, its first miss."""

    def chunk_stop(self, sequence: Sequence, stop: int) -> int:
        """Where a prefill chunk that could go on to position ``stop`` should end: there or before.

        After ``computed_tokens`` in any case. Caches whose checkpoints need a step to end at them say less.
        """

    def reset(self) -> bool:
        """Forget every cached block; False, changing nothing, while a sequence holds any block."""

    def block_hashes(self, sequence: Sequence) -> Row[BlockHash]:
        """The chained hashes of the sequence's full blocks of ``hash_tokens``, or the ids that name them.

        O(tokens not hashed yet).
        """

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order; empty unless they are recorded."""

    def take_evictions(self) -> list[Evicted]:
        """Evictions since the last call, in order; empty unless they are recorded.

        Their KV is whole until the next step runs: a lower tier copies it before.
        """

    def cached_hashes(self) -> Iterable[BlockHash]:
        """Block hashes that events told as stored and not yet as removed."""

    def stranded_tokens(self) -> int:
        """Positions that are resident but can never be hit, for want of what comes before. O(blocks)."""

    def check_invariants(self, sequences: Iterable[Sequence]) -> None:
        """Raise AssertionError unless the cache and the tables of ``sequences`` (all holders) agree."""


class KvCache(Cache[Matched], Protocol[Matched]):
    """A cache whose matches can be cut at any block: the KV of a prefix's prefix is there too."""

    def shorten(self, matched: Matched, blocks: int) -> Matched:
        """The first ``blocks`` blocks of what matched."""
