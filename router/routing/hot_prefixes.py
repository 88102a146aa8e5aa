"""Which beginnings of a prompt are hot, and what computing them once more counts for it (``heat.py``)."""

from collections.abc import Sequence
from typing import Final

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.heat import Heat
from router.routing.prompt_blocks import Prompt
from router.routing.roster import Roster
from router.routing.view import RoutingRequest

HEAD_TOKENS: Final = 1_024
"""Prompts are looked at twice: as far as they are cached, and this far."""
WORTH_A_LOOK: Final = 0.1
"""Holders whose queue is shorter than this share of what a hit saves are not left: no need to look."""

Levels = list[tuple[int, int]]
"""(replicas as bits, how many tokens of the prompt they hold), the deepest last; at least one."""


class HotPrefixes:
    """Owned by the fleet, which shows it every request that begins like something cached."""

    __slots__ = ("_caches", "_heat", "_replicas")

    def __init__(self, caches: CacheBeliefs, replicas: Roster, window_s: float) -> None:
        self._caches = caches
        self._replicas = replicas.by_index
        self._heat = Heat(window_s)

    def price(self, request: RoutingRequest, prompt: Prompt, levels: Levels) -> "Crowd | None":
        """Set ``request.copy_price`` if those who hold the prefix are crowded, and say what comes to them.

        ``None``: its holders have next to nothing queued, and nobody will leave them.
        """
        holders, tokens = levels[-1]
        holder = self._replicas[(holders & -holders).bit_length() - 1]
        if not holder.ledger.queued:
            return None
        prefill_s = holder.cost.prefill_s(request.prompt_tokens - tokens, tokens)
        saved_s = holder.cost.prefill_s(request.prompt_tokens, 0) - prefill_s
        if holder.ledger.backlog_s(request.now) + holder.held.prefill_s < WORTH_A_LOOK * saved_s:
            return None
        spare = 1.0 - request.fleet_utilization
        share, keys = 1.0, []
        for key, holders in self._beginnings(prompt, levels):
            share = min(share, self._heat.price_share(key, holders.bit_count(), spare, request.now))
            keys.append(key)
        request.copy_price = share
        return Crowd(keys, prefill_s)

    def heated(self, keys: Sequence[int], prefill_s: float, now: float) -> None:
        """A request that begins so, here or at another router, needs ``prefill_s`` seconds."""
        for key in keys:
            self._heat.asked(key, prefill_s, now)

    def _beginnings(self, prompt: Prompt, levels: Levels) -> list[tuple[int, int]]:
        """The longest cached prefix, and where that is longer the head: (key, replicas that hold it as bits).

        Prompts that part after a common document heat the document together.
        """
        holders, tokens = levels[-1]
        found = []
        if (key := self._caches.last_key(prompt, tokens)) is not None:
            found.append((key, holders))
        if tokens > 2 * HEAD_TOKENS and (key := self._caches.last_key(prompt, HEAD_TOKENS)) is not None:
            for mask, matched in levels:
                if matched >= HEAD_TOKENS:
                    holders |= mask
            found.append((key, holders))
        return found


class Crowd:
    """One more request for those who hold a prefix and have enough to do: ``keys`` name its beginnings."""

    __slots__ = ("keys", "prefill_s")

    def __init__(self, keys: list[int], prefill_s: float) -> None:
        self.keys = keys
        self.prefill_s = prefill_s
        """What the request needs on one of them."""
