"""Reads KV off an engine for another replica: what of a prompt lies on the device, then on the host.

Runs in the engine's thread, between steps. Nothing stays held: blocks that are gone at the next call are not
lent.
"""

from collections.abc import Callable
from collections.abc import Sequence as Row
from typing import Any

import torch

from replica.contract.kv_events import BlockHash
from replica.kv_cache.cache import Cache
from replica.model.paged_kv import PagedKv
from replica.sequence import Sequence


class Lending:
    """The blocks of one engine, to be copied."""

    def __init__(
        self, cache: Cache[Any], kv: PagedKv, on_host: Callable[[BlockHash], torch.Tensor | None]
    ) -> None:
        """``on_host``: a block's KV, if the host has it."""
        self._cache = cache
        self._kv = kv
        self._on_host = on_host

    def lend(self, prompt: Sequence, wanted: Row[int]) -> list[tuple[bytes, memoryview]]:
        """(chained hash, KV) of the blocks ``wanted`` of ``prompt``, in order, up to the first not here.

        Tokens are compared as for any hit. Cost: one match, and the copying.
        """
        cache, kv = self._cache, self._kv
        if not cache.enabled:
            return []
        hashes = cache.block_hashes(prompt)
        cache.hold(prompt, cache.match(prompt))
        pages = cache.hash_tokens // cache.block_size
        lent: list[tuple[bytes, memoryview]] = []
        try:
            for number in wanted:
                if number >= len(hashes):
                    break
                name = hashes[number]
                assert isinstance(name, bytes)
                entries = prompt.block_table[number * pages : (number + 1) * pages]
                on_device = len(entries) == pages
                block = kv.read(kv.slots(entries)) if on_device else self._on_host(name)
                if block is None:
                    break
                lent.append((name, kv.to_bytes(block)))
        finally:
            cache.release(prompt)
        return lent
