"""sglang-router 0.3.2 ``cache_aware``, with its command line's defaults (0.3 / 64 / 1.5).

1. Loads are requests in flight. If the largest exceeds the smallest by more than 64 *and* 1.5 times, the
   fleet is imbalanced: least loaded, the first of equals. Prefixes do not count.
2. Else the longest prefix in one tree of all prompts ever sent, all replicas together. If more than 30% of
   the prompt match, the replica that was *last* sent the matched node (one, not the best of its holders).
3. Else least loaded.
4. The prompt enters the tree for whoever was chosen. A matched replica that may not be used loses its whole
   tree, and the first usable one is taken.

Its tree is of characters and holds at most 2**26 per replica, here 2**24 tokens of four; blocks stand for
characters. Source: ``policies/cache_aware.rs`` and ``tree.rs`` of version 0.3.2.
"""

import random
from collections.abc import Sequence

from router.routing.decision import Decision
from router.routing.in_flight import InFlight
from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import Rule, decision

CACHE_THRESHOLD = 0.3
BALANCE_ABS_THRESHOLD = 64
BALANCE_REL_THRESHOLD = 1.5
MAX_TREE_TOKENS = 1 << 24


class SglangCacheAware(Rule):
    """Promise: in a balanced fleet a prompt known by more than 30% goes where its match was last sent."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._tree: PrefixIndex | None = None
        self._replicas = 0
        self._last_sent: dict[int, int] = {}
        self._prompt: Prompt | None = None

    def arriving(self, prompt: Prompt) -> None:
        """Remember whose prompt is asked about."""
        self._prompt = prompt

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """Balance, match, or least loaded."""
        loads = [candidate.ledger.in_flight for candidate in candidates]
        highest, lowest = max(loads), min(loads)
        balanced = highest - lowest <= BALANCE_ABS_THRESHOLD or highest <= lowest * BALANCE_REL_THRESHOLD
        chosen = candidates[loads.index(lowest)]
        if balanced and (known := self._known()) is not None:
            by_index = {candidate.index: candidate for candidate in candidates}
            if known in by_index:
                chosen = by_index[known]
            else:
                assert self._tree is not None
                self._tree.clear(known)
                chosen = candidates[0]
        return decision(request, candidates, chosen)

    def _known(self) -> int | None:
        """Who was last sent the longest known prefix, if that is more than the threshold."""
        prompt, tree = self._prompt, self._tree
        if prompt is None or tree is None:
            return None
        levels = tree.levels(prompt.keys)
        if not levels:
            return None
        holders, blocks = levels[-1]
        if prompt.layout.end(blocks) <= CACHE_THRESHOLD * prompt.units:
            return None
        last = self._last_sent[prompt.keys[blocks - 1]]
        return last if holders >> last & 1 else (holders & -holders).bit_length() - 1

    def sent(self, flight: InFlight, now: float) -> None:
        """The prompt enters the tree under its replica."""
        keys, replica = flight.prompt.keys, flight.replica.index
        if replica >= self._replicas:
            self._grow(replica + 1, flight.prompt)
        assert self._tree is not None
        self._tree.insert(replica, keys)
        self._last_sent.update(dict.fromkeys(keys, replica))

    def _grow(self, replicas: int, prompt: Prompt) -> None:
        if self._tree is None:
            self._tree = PrefixIndex(0, prompt.layout, MAX_TREE_TOKENS)
        while self._replicas < replicas:
            self._tree.add_replica(MAX_TREE_TOKENS)
            self._replicas += 1
