"""The hash-chained prefix cache: match a sequence, adopt what matched, publish what was computed."""

from collections.abc import Callable
from dataclasses import dataclass

from replica.contract.block_hash import raw_block_hash
from replica.contract.kv_events import CacheEvent
from replica.sequence import Sequence

RawBlockHash = Callable[[bytes, bytes], bytes]


@dataclass(slots=True)
class PrefixCounters:
    """Tokens looked up and found, counted once per admission; resumed sequences apart (as vLLM)."""

    queried_tokens: int = 0
    hit_tokens: int = 0
    resumed_queried_tokens: int = 0
    resumed_hit_tokens: int = 0


class PrefixCache:
    """Blocks of a fixed pool, shared by sequences with one prefix."""

    def __init__(
        self,
        blocks: int,
        block_size: int = 16,
        *,
        enabled: bool = True,
        record_events: bool = False,
        raw_hash: RawBlockHash = raw_block_hash,
    ) -> None:
        self.block_size = block_size
        self.enabled = enabled
        self.counters = PrefixCounters()

    def match(self, sequence: Sequence) -> list[int]:
        """Blocks that hold the sequence's longest cached prefix. Changes nothing (no LRU touch, no count)."""
        raise NotImplementedError

    def adopt(self, sequence: Sequence, matched: list[int], spare_blocks: int = 0) -> bool:
        """Give a sequence its matched blocks and new ones for all tokens it knows, or nothing at all."""
        raise NotImplementedError

    def extend(self, sequence: Sequence) -> bool:
        """Give a running sequence room for its newest token; False when no block is free."""
        raise NotImplementedError

    def publish(self, sequence: Sequence) -> None:
        """Make the sequence's full blocks hittable whose KV is computed (``computed_tokens``)."""
        raise NotImplementedError

    def release(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence that finished, was aborted or preempted."""
        raise NotImplementedError

    def reset(self) -> bool:
        """Forget every cached block; False, changing nothing, while a sequence holds one."""
        raise NotImplementedError

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order; empty unless ``record_events``."""
        raise NotImplementedError

    def check_invariants(self, sequences: list[Sequence]) -> None:
        """Raise AssertionError unless pool, map and the sequences' tables agree."""
        raise NotImplementedError
