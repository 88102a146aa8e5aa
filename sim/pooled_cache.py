"""A bound for every router: one cache for the whole fleet, known exactly, and requests held until their turn.

All replicas compute into one pool as large as theirs together, so a hit is a hit wherever a request runs and
routing is about load alone. What is left of routing is ``predicted_finish`` with hold and no mistakes about
hits. Not a proven bound: two replicas that are given one new prefix at the same time both compute it.
"""

import random
from collections.abc import Sequence as Sequences

from replica.kv_cache.prefix_cache import PrefixCache
from replica.sequence import Sequence
from router.routing.decision import Assessment, Decision
from router.routing.policies.predicted_finish import PredictedFinish
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.watcher import Watcher


class PooledCache(PrefixCache):
    """A prefix cache that several schedulers share. Each of them may count on the blocks it sees free.

    A sequence is let in only if the blocks that all who are in will still take are left to them.
    """

    def __init__(self, blocks: int, block_tokens: int) -> None:
        super().__init__(blocks, block_tokens)
        self._promised = 0

    def _to_come(self, sequence: Sequence, held_blocks: int) -> int:
        return max(0, self.blocks_for(sequence.prompt_tokens + sequence.max_tokens - 1) - held_blocks)

    def fits(self, sequence: Sequence, matched: list[int], spare_blocks: int = 0) -> bool:
        """Whether ``adopt`` would succeed."""
        to_come = self._to_come(sequence, self.blocks_for(sequence.total_tokens))
        return super().fits(sequence, matched, spare_blocks + self._promised + to_come)

    def adopt(self, sequence: Sequence, matched: list[int], spare_blocks: int = 0) -> bool:
        """As a cache of its own; promises the blocks of its answer."""
        if not super().adopt(sequence, matched, spare_blocks):
            return False
        self._promised += self._to_come(sequence, len(sequence.block_table))
        return True

    def extend(self, sequence: Sequence) -> bool:
        """As a cache of its own, out of what was promised."""
        before = len(sequence.block_table)
        fitted = super().extend(sequence)
        self._promised -= len(sequence.block_table) - before
        return fitted

    def take_block(self, sequence: Sequence) -> None:
        """As a cache of its own, out of what was promised."""
        super().take_block(sequence)
        self._promised -= 1

    def release(self, sequence: Sequence) -> None:
        """As a cache of its own; what was promised and not taken is anybody's."""
        self._promised -= self._to_come(sequence, len(sequence.block_table))
        super().release(sequence)


class PooledFinish(Watcher):
    """``predicted_finish`` that looks into the pool. ``cache`` is set by whoever builds the fleet."""

    samples = True

    def __init__(self, rng: random.Random) -> None:
        self.cache: PooledCache | None = None
        self._rule = PredictedFinish(rng)
        self._cached_tokens = 0

    def arriving(self, prompt: Prompt) -> None:
        """Look up what is cached, as the scheduler will."""
        assert self.cache is not None
        size = self.cache.block_size
        sequence = Sequence.of_blocks("look", prompt.keys, prompt.units, 1, block_size=size)
        self._cached_tokens = len(self.cache.match(sequence)) * size

    def choose(self, request: RoutingRequest, candidates: Sequences[ReplicaState]) -> Decision:
        """Every candidate has what the pool has."""
        return self._rule.choose(self._known(request), candidates)

    def copy(self) -> "PooledFinish":
        """An independent one in the same state, before the same pool."""
        twin = PooledFinish(random.Random())
        twin.cache, twin._rule, twin._cached_tokens = self.cache, self._rule.copy(), self._cached_tokens
        return twin

    def assess(self, request: RoutingRequest, candidates: Sequences[ReplicaState]) -> list[Assessment]:
        """Every candidate has what the pool has."""
        return self._rule.assess(self._known(request), candidates)

    def _known(self, request: RoutingRequest) -> RoutingRequest:
        request.matched_tokens = [self._cached_tokens] * len(request.matched_tokens)
        return request
