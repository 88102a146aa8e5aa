"""Prefixes that many requests continue, held so that a burst of strangers does not evict them.

LRU forgets a system prompt that pauses for longer than strangers need to fill the memory. Where requests'
matches *end* is where they part from what others asked before; a place at which many end is such a prompt.

A pin is a sequence that never runs. It is soft: it gives way before anybody is preempted, and before a
request is kept waiting while nothing runs.
"""

from hashlib import blake2b
from typing import Any

from replica.contract.block_hash import token_bytes
from replica.contract.multimodal import multimodal_frame, multimodal_keys
from replica.kv_cache.cache import Cache
from replica.sequence import Sequence

GRID_TOKENS = 16
"""Ends of matches are counted at multiples of this: texts agree by chance for a token or two more."""
AGE_AFTER = 256
"""Admissions after which all heat is halved."""
MOST_COUNTED = 1024
"""Prefixes whose heat is known; more of them age sooner."""

Key = bytes | tuple[bytes, object]


class HotPrefixes:
    """Counts where matches end and holds the hottest of these prefixes, at most ``max_blocks`` in all.

    >>> from replica.kv_cache.prefix_cache import PrefixCache
    >>> cache = PrefixCache(64, block_size=16)
    >>> hot = HotPrefixes(cache, max_blocks=8, hot_after=2)
    >>> held = []
    >>> for number in range(4):
    ...     request = Sequence(f"r{number}", [*range(32), number, 7], max_tokens=1)
    ...     _ = cache.adopt(request, cache.match(request)); hot.admitted(request)
    ...     request.computed_tokens = 34; cache.publish(request); cache.release(request)
    ...     held.append(hot.blocks)
    >>> held                                        # the first match is the second request's
    [0, 0, 2, 2]
    >>> cache.free_blocks, hot.give_way(), hot.give_way(), cache.free_blocks
    (62, True, False, 64)
    """

    def __init__(self, cache: Cache[Any], max_blocks: int, hot_after: int = 4) -> None:
        """``hot_after``: matches that must have ended at a prefix before it is held."""
        self._cache = cache
        self._max_blocks = max_blocks
        self._hot_after = hot_after
        self._grid = -(-GRID_TOKENS // cache.block_size) * cache.block_size
        self._heat: dict[Key, int] = {}
        self._pins: dict[Key, Sequence] = {}
        self._admissions = 0

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that hold the prefixes."""
        return list(self._pins.values())

    @property
    def blocks(self) -> int:
        """Table entries held; a block under two pins counts twice."""
        return sum(len(pin.block_table) for pin in self._pins.values())

    def admitted(self, sequence: Sequence) -> None:
        """A sequence was adopted, with a hit of ``computed_tokens``."""
        tokens = sequence.computed_tokens // self._grid * self._grid
        if not tokens or sequence.preemptions:
            return
        self._admissions += 1
        key = self._key(sequence, tokens)
        heat = self._heat[key] = self._heat.get(key, 0) + 1
        if heat >= self._hot_after and key not in self._pins:
            self._pin(key, sequence, tokens)
        if self._admissions % AGE_AFTER == 0 or len(self._heat) > MOST_COUNTED:
            self._age()

    def give_way(self) -> bool:
        """Let go of the coldest prefix held; False when none is."""
        if not self._pins:
            return False
        self._unpin(min(self._pins, key=lambda key: self._heat[key]))
        return True

    def clear(self) -> None:
        """Let go of all and forget their heat."""
        while self.give_way():
            pass
        self._heat.clear()

    def check_invariants(self) -> None:
        """Raise AssertionError unless the pins are within bounds and known."""
        assert self.blocks <= self._max_blocks
        assert self._pins.keys() <= self._heat.keys()
        assert len(self._heat) <= MOST_COUNTED

    def _pin(self, key: Key, sequence: Sequence, tokens: int) -> None:
        blocks = self._cache.blocks_for(tokens)
        if blocks > self._max_blocks:
            return
        while self.blocks + blocks > self._max_blocks:
            coldest = min(self._pins, key=lambda pinned: self._heat[pinned])
            if self._heat[coldest] >= self._heat[key]:
                return
            self._unpin(coldest)
        pin = sequence.prefix(f"hot prefix of {sequence.request_id}", tokens + 1)
        matched = self._cache.match(pin)
        if len(matched) == blocks:
            self._cache.hold(pin, matched)
            self._pins[key] = pin

    def _unpin(self, key: Key) -> None:
        self._cache.release(self._pins.pop(key))

    def _age(self) -> None:
        for key in list(self._heat):
            self._heat[key] //= 2
            if not self._heat[key]:
                del self._heat[key]
                if key in self._pins:
                    self._unpin(key)

    def _key(self, sequence: Sequence, tokens: int) -> Key:
        if sequence.id_block_size is not None:
            return sequence.root, sequence.block_hashes[tokens // sequence.id_block_size - 1]
        images = multimodal_frame(multimodal_keys(sequence.multimodal, 0, tokens))
        named = sequence.root + token_bytes(sequence.token_ids[:tokens]) + images
        return blake2b(named, digest_size=16).digest()
