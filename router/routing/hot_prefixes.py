"""Which beginnings of a prompt are hot, and what computing them once more counts for it (``heat.py``)."""

from collections.abc import Iterator, Sequence

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.heat import Heat
from router.routing.prompt_blocks import Prompt

HEAD_TOKENS = 1_024
"""Prompts are looked at twice: as far as they are cached, and this far."""

Levels = Sequence[tuple[int, int]]
"""(replicas as bits, how many tokens of the prompt they hold), the deepest last."""


class HotPrefixes:
    """Owned by the fleet, which tells it of every request that begins like something cached."""

    __slots__ = ("_caches", "_heat")

    def __init__(self, caches: CacheBeliefs, window_s: float) -> None:
        self._caches = caches
        self._heat = Heat(window_s)

    def asked(self, prompt: Prompt, levels: Levels, prefill_s: float, now: float) -> None:
        """A request needs ``prefill_s`` seconds on those who hold most of it."""
        for key, _ in self._beginnings(prompt, levels):
            self._heat.asked(key, prefill_s, now)

    def copy_price(self, prompt: Prompt, levels: Levels, spare: float, now: float) -> float:
        """The share of its price on others that computing the cached prefix once more counts, 0 to 1.

        ``spare``: share of the fleet's time that prefill does not fill.
        """
        if not levels:
            return 1.0
        return min(
            (
                self._heat.price_share(key, holders.bit_count(), spare, now)
                for key, holders in self._beginnings(prompt, levels)
            ),
            default=1.0,
        )

    def _beginnings(self, prompt: Prompt, levels: Levels) -> Iterator[tuple[int, int]]:
        """The longest cached prefix, and where that is longer the head: (key, replicas that hold it as bits).

        Prompts that part after a common document heat the document together.
        """
        holders, tokens = levels[-1]
        if (key := self._caches.last_key(prompt, tokens)) is not None:
            yield key, holders
        if tokens > 2 * HEAD_TOKENS and (key := self._caches.last_key(prompt, HEAD_TOKENS)) is not None:
            for mask, matched in levels:
                if matched >= HEAD_TOKENS:
                    holders |= mask
            yield key, holders
