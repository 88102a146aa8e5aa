"""Which prefix cache a replica has, and how it is made."""

from dataclasses import dataclass
from typing import Literal

from replica.kv_cache.eviction_order import eviction_order
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache

CacheKind = Literal["blocks", "radix"]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """Hash-chained blocks (vLLM's way), or a radix tree of pages (SGLang's).

    >>> tree = CacheSettings("radix", page_size=4, eviction="slru").make(tokens=1_000, block_size=16)
    >>> tree.blocks, tree.block_size, tree.hash_tokens
    (250, 4, 16)
    """

    kind: CacheKind = "blocks"
    page_size: int | None = None
    """Tokens in a page of the tree; None: as many as in a block. Whole pages make a block."""
    eviction: str = "lru"
    """Of the tree: lru, slru, lfu or tlru. Blocks are always evicted in the order of last use."""
    tail_slack_tokens: int = 0
    """For tlru: what a returning conversation may recompute."""

    def __post_init__(self) -> None:
        """Raise ValueError naming what does not fit together."""
        if self.kind == "blocks" and (self.page_size is not None or self.eviction != "lru"):
            raise ValueError(
                "page_size and eviction are the radix tree's, and kind is blocks: "
                "set kind to radix or remove them"
            )
        if self.eviction != "tlru" and self.tail_slack_tokens:
            raise ValueError(
                f"tail_slack_tokens is for eviction tlru, and eviction is {self.eviction}: remove one of them"
            )
        eviction_order(self.eviction, self.tail_slack_tokens // (self.page_size or 1))

    def make(
        self,
        tokens: int,
        block_size: int,
        *,
        enabled: bool = True,
        record_events: bool = False,
        record_evictions: bool = False,
    ) -> PrefixCache | RadixCache:
        """An empty cache of ``tokens`` positions, as many as fit in whole blocks or pages.

        ``block_size``: tokens that a hash stands for. Raises ValueError when it is no multiple of the page.
        """
        if self.kind == "blocks":
            return PrefixCache(
                tokens // block_size,
                block_size,
                enabled=enabled,
                record_events=record_events,
                record_evictions=record_evictions,
            )
        page = self.page_size or block_size
        return RadixCache(
            tokens // page,
            page,
            enabled=enabled,
            record_events=record_events,
            record_evictions=record_evictions,
            event_block_size=block_size,
            eviction=self.eviction,
            tail_slack_tokens=self.tail_slack_tokens,
        )
