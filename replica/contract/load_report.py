"""What a replica tells about its load and its cache."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One reading of a replica's own gauges and counters; ``None`` is "not told", never zero."""

    engine: str | None = None
    """Which kind of server tells, where that is known: "vllm", "sglang" and so on."""
    running: int | None = None
    """Requests in the engine's current batch."""
    waiting: int | None = None
    """Requests in the engine's queue."""
    kv_usage: float | None = None
    """Share of KV blocks that active requests hold, 0 to 1."""
    prefix_queried_tokens: float | None = None
    """Counter: prompt tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: float | None = None
    """Counter: of those, tokens found."""
    capacity_tokens: int | None = None
    """Tokens the KV cache holds in all."""
    memory_share: float | None = None
    """Of each GPU's memory, what the engine was given (vLLM's ``gpu_memory_utilization``)."""
    block_size: int | None = None
    """Tokens in a KV block."""
    hash_algorithm: str | None = None
    """How KV blocks are hashed: vLLM's "sha256", "sha256_cbor" and so on; ours is "warmroute"."""
    cache_salts: str | None = None
    """Whose ``cache_salt`` it takes: "none" (one gets 400), "signed" or "any"; only ours tells."""
