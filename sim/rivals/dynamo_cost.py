"""NVIDIA Dynamo 1.6 ``kv`` router: prefill blocks still to compute plus decode blocks held.

::

    cost = max((active prefill tokens + prompt tokens) / block - matched blocks, 0)
         + distinct blocks of active requests, this one's included

in KV blocks, with its defaults (overlap credit 1, prefill scale 1, no decay, temperature 0). Prefill tokens
are charged net of what was cached, from dispatch to the first token; blocks are shared among active requests
that hold the same ones. Ties at random. Compute and memory are added one to one: a block of prefill costs
30 ms on one replica and 1 ms on another, a block held costs nothing until there is no room.
Source: ``lib/kv-router/src/scheduling/selector/default.rs`` as read in September 2026.
"""

import random
from collections.abc import Sequence

from router.routing.counted_holders import CountedHolders
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.pending_prefill import PendingPrefill
from sim.rivals.rule import ScoreRule

MOST_REPLICAS = 1024


class DynamoCost(ScoreRule):
    """Promise: no candidate had fewer blocks to compute and to hold."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._pending = PendingPrefill()
        self._active = CountedHolders(MOST_REPLICAS)
        self._keys: Sequence[int] = ()
        self._block_tokens = 1

    def arriving(self, prompt: Prompt) -> None:
        """Remember the keys of the prompt that is asked about."""
        self._keys = prompt.keys
        self._block_tokens = prompt.layout.end(1)

    def scores(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[float]:
        """Blocks."""
        size, matched = self._block_tokens, request.matched_tokens
        own = -(-request.prompt_tokens // size)
        shared = self._shared(candidates)
        scores = []
        for candidate in candidates:
            index = candidate.index
            prefill = (self._pending.tokens(index) + request.prompt_tokens - matched[index]) / size
            held = self._active.held[index] + own - shared[index]
            scores.append(max(prefill, 0.0) + held)
        return scores

    def _shared(self, candidates: Sequence[ReplicaState]) -> dict[int, int]:
        """By replica: blocks of the prompt that its active requests hold already."""
        counts = {candidate.index: 0 for candidate in candidates}
        masks = self._active.masks
        for key in self._keys:
            mask = masks.get(key, 0)
            while mask:
                low = mask & -mask
                index = low.bit_length() - 1
                if index in counts:
                    counts[index] += 1
                mask ^= low
        return counts

    def sent(self, flight: InFlight, now: float) -> None:
        """Its uncached tokens are queued, its blocks active."""
        self._pending.sent(flight)
        for key in flight.prompt.keys:
            self._active.add(flight.replica.index, key)

    def first_token(self, flight: InFlight, now: float) -> None:
        """Its prefill is done."""
        self._pending.done(flight)

    def over(self, flight: InFlight, now: float) -> None:
        """Its blocks are active no more."""
        self._pending.done(flight)
        for key in flight.prompt.keys:
            self._active.remove(flight.replica.index, key)
