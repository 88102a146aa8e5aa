"""Which beginnings of a prompt are hot, and what computing them once more counts for it (``heat.py``)."""

from collections.abc import Iterator, Sequence

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.heat import Heat
from router.routing.prompt_blocks import Prompt
from router.routing.roster import Roster
from router.routing.view import RoutingRequest

HEAD_TOKENS = 1_024
"""Prompts are looked at twice: as far as they are cached, and this far."""
WORTH_A_LOOK = 0.1
"""Holders whose queue is shorter than this share of what a hit saves are not left: no need to look."""

Levels = Sequence[tuple[int, int]]
"""(replicas as bits, how many tokens of the prompt they hold), the deepest last; at least one."""


class HotPrefixes:
    """Owned by the fleet, which shows it every request that begins like something cached."""

    __slots__ = ("_caches", "_heat", "_replicas")

    def __init__(self, caches: CacheBeliefs, replicas: Roster, window_s: float) -> None:
        self._caches = caches
        self._replicas = replicas.by_index
        self._heat = Heat(window_s)

    def price(self, request: RoutingRequest, prompt: Prompt, levels: Levels) -> float | None:
        """Set ``request.copy_price``; returns the seconds the request needs on a holder if that is crowded.

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
        request.copy_price = min(
            (
                self._heat.price_share(key, holders.bit_count(), spare, request.now)
                for key, holders in self._beginnings(prompt, levels)
            ),
            default=1.0,
        )
        return prefill_s

    def asked(self, prompt: Prompt, levels: Levels, prefill_s: float, now: float) -> list[int]:
        """A request needs ``prefill_s`` seconds on those who hold most of it; the keys of its beginnings."""
        keys = [key for key, _ in self._beginnings(prompt, levels)]
        self.heated(keys, prefill_s, now)
        return keys

    def heated(self, keys: Sequence[int], prefill_s: float, now: float) -> None:
        """A request that begins so, here or at another router, needs ``prefill_s`` seconds."""
        for key in keys:
            self._heat.asked(key, prefill_s, now)

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
