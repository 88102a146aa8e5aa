"""The caches that must pass the contract, each made from a size in tokens."""

from collections.abc import Callable
from functools import partial
from typing import Any

from replica.contract.block_hash import chain, root_hash
from replica.kv_cache.cache import Cache
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from replica.kv_cache.state_checkpoints import StateCheckpoints
from replica.sequence import Sequence

PAGE = 4
"""Tokens in a block of every cache here but the one with pages of one token."""


def blocks(tokens: int, **options: Any) -> Cache[Any]:
    return PrefixCache(tokens // PAGE, PAGE, **options)


def radix(tokens: int, **options: Any) -> Cache[Any]:
    return RadixCache(tokens // PAGE, PAGE, **options)


def radix_token(tokens: int, **options: Any) -> Cache[Any]:
    return RadixCache(tokens, 1, event_block_size=PAGE, **options)


MAKERS: dict[str, Callable[..., Cache[Any]]] = {
    "blocks": PrefixCache,
    **{f"radix {order}": partial(RadixCache, eviction=order) for order in ("lru", "slru", "lfu")},
    "radix tlru": partial(RadixCache, eviction="tlru", tail_slack_tokens=8),
    "radix, events by two": lambda blocks, size, **options: RadixCache(
        blocks, size, event_block_size=2 * size, **options
    ),
}
"""Called with (blocks, block_size, options)."""


def true_names(size: int) -> Callable[[Sequence], list[bytes]]:
    """Names of blocks that do not collide, whatever hash the cache was given."""

    def names(sequence: Sequence) -> list[bytes]:
        root = root_hash(sequence.salt, sequence.adapter)
        return chain(sequence.token_ids, size, root, items=sequence.multimodal)

    return names


def hybrid(kind: str, slots: int = 5, **settings: Any) -> Callable[..., Cache[Any]]:
    def make(blocks: int, size: int, **options: Any) -> Cache[Any]:
        kv = MAKERS[kind](blocks, size, **options)
        return HybridCache(kv, StateCheckpoints(slots), names=true_names(kv.hash_tokens), **settings)

    return make


HYBRIDS: dict[str, Callable[..., Cache[Any]]] = {
    "hybrid blocks": hybrid("blocks"),
    "hybrid radix": hybrid("radix lru"),
    "hybrid radix, states by two": hybrid("radix, events by two", slots=4, interval=8),
    "hybrid blocks, many states": hybrid("blocks", slots=40),
}
"""Called like MAKERS; a runner must report what it ran."""

CACHES: dict[str, Callable[..., Cache[Any]]] = {"blocks": blocks, "radix": radix, "radix_token": radix_token}


def snapshot(cache: Cache[Any]) -> object:
    """Everything that decides what the cache does next, as plain values."""
    if isinstance(cache, PrefixCache):
        pool = cache.pool
        return (
            [block.number for block in pool.free],
            [(b.references, b.key, b.content, b.parent, b.identity) for b in pool.blocks],
            cache.counters,
        )
    assert isinstance(cache, RadixCache)
    tree = cache.tree
    nodes = [
        (
            n.namespace,
            n.start,
            tuple(n.units),
            tuple(n.slots),
            tuple(n.hashes),
            n.pins,
            n.uses,
            n.last_use,
            n.lost,
        )
        for n in tree.walk()
    ]
    return sorted(nodes, key=repr), list(cache._free), tree.cached, tree.evictable, cache.counters
