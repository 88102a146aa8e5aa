"""Sizes and options of an engine, in the words of its cache and of its scheduler."""

from dataclasses import dataclass, field
from pathlib import Path

from replica.contract.prefill_cost import PrefillCost
from replica.kv_cache.cache_settings import CacheSettings
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.limits import SchedulerLimits
from replica.peers.peer_limits import PeerLimits


@dataclass(frozen=True, slots=True)
class TierLimits:
    """Memory below the device's."""

    host_bytes: int = 0
    disk_folder: Path | None = None
    disk_bytes: int = 0
    disk_bytes_per_day: int | None = None
    """Written at most; None: no limit."""
    prefill: PrefillCost | None = None
    """What computing costs, which fetching must beat; None: measured."""
    peers: PeerLimits | None = None
    """Other replicas."""

    @property
    def keeps(self) -> bool:
        """What the device evicts has a place to go."""
        return bool(self.host_bytes or self.disk_bytes)


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Sizes of an engine. Tokens, unless named otherwise."""

    kv_blocks: int
    block_size: int = 16
    """What a block hash stands for; a radix tree's pages may be smaller."""
    max_running: int = 32
    """Sequences in one step."""
    max_batched_tokens: int = 512
    max_model_len: int = 8192
    prefix_caching: bool = True
    cache: CacheSettings = field(default_factory=CacheSettings)
    tiers: TierLimits | None = None
    record_events: bool = False
    """Keep cache events for ``take_events``, which must then be called."""
    pinned_tokens: int = 0
    """What the hottest prefixes may keep from eviction."""
    max_chunk_tokens: int | None = None
    """Of one prefill in one step; None: all that fit."""
    longest_prefix_first: bool = False
    max_overtaken: int = 16
    """Requests that may pass one for their longer cached prefix."""
    shares_prefills: bool = True
    """Of requests with one new prefix the first computes it."""
    batch_invariant: bool = False
    state_slots: int | None = None
    """Recurrent states, live ones and checkpoints; None: twice ``max_running``."""
    kv_int8: bool = False
    """K and V are kept in 8 bits."""

    def make_cache(self) -> PrefixCache | RadixCache:
        """The KV cache of these sizes. Raises ValueError when blocks are not whole pages."""
        return self.cache.make(
            self.kv_blocks * self.block_size,
            self.block_size,
            enabled=self.prefix_caching,
            record_events=self.record_events,
            record_evictions=self.tiers is not None and self.tiers.keeps,
        )

    def make_states(self) -> StateCheckpoints:
        """Slots for recurrent states."""
        return StateCheckpoints(self.state_slots or 2 * self.max_running)

    def scheduler_limits(self, page_size: int) -> SchedulerLimits:
        """What a step may hold, where tables name pages of ``page_size`` tokens."""
        return SchedulerLimits(
            max_running=self.max_running,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            max_chunk_tokens=self.max_chunk_tokens,
            longest_prefix_first=self.longest_prefix_first,
            max_overtaken=self.max_overtaken,
            shares_prefills=self.shares_prefills,
            pinned_blocks=self.pinned_tokens // page_size,
        )
