"""The keys of ``cache:`` in a replica's YAML."""

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt, model_validator

from replica.config_values import Section
from replica.kv_cache.cache_settings import CacheKind, CacheSettings


class CacheConfig(Section):
    """The prefix cache."""

    kind: CacheKind = "blocks"
    """Hash-chained blocks, or a radix tree, whose hits end at any page."""
    page_size: PositiveInt | None = None
    """radix: tokens in a page, 1 unless set; a block must be whole pages."""
    eviction: Literal["lru", "slru", "lfu", "tlru"] = "lru"
    """radix: which leaf goes first."""
    tail_slack_tokens: NonNegativeInt = 0
    """tlru: what a returning conversation may recompute within its latency budget, less what it brings."""
    pinned_tokens: NonNegativeInt = 0
    """What prefixes that many requests continue may keep from eviction."""

    def settings(self) -> CacheSettings:
        """For the code that makes the cache. Raises ValueError for what does not fit together."""
        page_size = (self.page_size or 1) if self.kind == "radix" else self.page_size
        return CacheSettings(self.kind, page_size, self.eviction, self.tail_slack_tokens)

    @model_validator(mode="after")
    def _fits(self) -> "CacheConfig":
        self.settings()
        return self
