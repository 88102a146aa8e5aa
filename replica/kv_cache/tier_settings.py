"""Sizes, budgets and assumed speeds of the tiers, and counters of what became of blocks in them."""

from dataclasses import dataclass, field

from replica.kv_cache.fetch_plan import Tier


@dataclass(frozen=True, slots=True)
class TierSettings:
    """Sizes and assumptions; speeds are measured from the first copy on."""

    block_tokens: int
    """Tokens a block hash stands for."""
    block_bytes: int
    """KV bytes of such a block."""
    host_blocks: int = 0
    disk_blocks: int = 0
    disk_bytes_per_day: int | None = None
    """Write budget; None: no limit."""
    spill_ahead: int = 0
    """Of the host's coldest blocks, how many should be on disk too."""
    spills_at_once: int = 4
    """Copies to disk in flight, so that a slow disk is not given more than it can write."""
    saves_at_once: int = 1_024
    """Copies from the device to disk in flight, where there is no host: each holds a block's memory."""
    layers: int = 1
    """Model layers, if a fetch runs layer by layer while computing; 1: computing waits for the fetch."""
    host_latency_s: float = 50e-6
    host_bytes_per_s: float = 10e9
    disk_latency_s: float = 200e-6
    disk_bytes_per_s: float = 1.5e9
    peer_latency_s: float = 1e-3
    peer_bytes_per_s: float = 1e9

    def __post_init__(self) -> None:
        least = dict.fromkeys(("block_tokens", "block_bytes", "spills_at_once", "saves_at_once", "layers"), 1)
        least |= dict.fromkeys(("host_blocks", "disk_blocks", "spill_ahead"), 0)
        for name, at_least in least.items():
            if getattr(self, name) < at_least:
                raise ValueError(f"{name} is {getattr(self, name)}: give at least {at_least}")


@dataclass(slots=True)
class TierCounters:
    """What happened, in blocks unless said otherwise."""

    saved: int = 0
    not_saved: int = 0
    """Evicted from the device with no room below it, or as too many copies were under way or one failed."""
    spilled: int = 0
    over_budget: int = 0
    """Times nothing was spilled for want of write budget."""
    lost: int = 0
    """Dropped by the host while no lower tier had them."""
    fetched: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    recomputed: int = 0
    """Within reach of a request that computed them: that was faster."""
    corrupt: int = 0
    late_fetches: int = 0
    gone: int = 0
    """Fetches that a peer could serve only in part."""
    failed_fetches: int = 0
