"""DualMap (ICLR '26, arXiv 2602.06502): two hashed homes per prefix, the cached one unless it is too slow.

A prompt's prefix is hashed twice; the two homes are the only candidates. The one that holds more of the
prompt is taken unless its expected time to first token exceeds the SLO (5 s, as in the paper); then the one
with the shorter queue. A prefix that more than 2/n of the recent traffic shares is hashed one block deeper,
so that a system prompt common to all does not decide alone.

Left out: its migration of queued requests from an overloaded home to the other one (an engine's queue cannot
be taken back here), and the ring by which it scales.
"""

import random
from collections import Counter, deque
from collections.abc import Sequence

from router.routing.decision import Decision
from router.routing.policies.own_delay import assess_own_delay
from router.routing.policies.rendezvous import home
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.rivals.rule import Rule, decision

SLO_TTFT_S = 5.0
WINDOW_REQUESTS = 1_000
FEWEST_REQUESTS = 50
"""Shares of fewer say nothing."""


class DualMap(Rule):
    """Promise: a prefix is served by one of its two homes."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self._keys: Sequence[int] = ()
        self._recent: deque[Sequence[int]] = deque()
        self._counts: Counter[int] = Counter()

    def arriving(self, prompt: Prompt) -> None:
        """Remember the keys of the prompt that is asked about."""
        self._keys = prompt.keys

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The better of two homes."""
        key = self._hashed_key(len(candidates))
        if key is None or len(candidates) == 1:
            return decision(request, candidates, self.rng.choice(candidates))
        name = key.to_bytes(8, "little")
        first, _ = home(b"one" + name, candidates)
        second, _ = home(b"two" + name, [c for c in candidates if c.index != first.index])
        rows = assess_own_delay(request, [first, second])
        cached, other = (0, 1) if rows[0].matched_tokens >= rows[1].matched_tokens else (1, 0)
        if rows[0].matched_tokens == rows[1].matched_tokens and rows[1].wait_s < rows[0].wait_s:
            cached, other = 1, 0
        if rows[cached].total_s > SLO_TTFT_S and rows[other].wait_s < rows[cached].wait_s:
            cached = other
        return decision(request, candidates, (first, second)[cached])

    def _hashed_key(self, replicas: int) -> int | None:
        """The first block key whose prefix is not too popular; counts what it looked at."""
        hot = 2.0 / replicas * max(FEWEST_REQUESTS, len(self._recent))
        depth = 0
        while depth + 1 < len(self._keys) and self._counts[self._keys[depth]] > hot:
            depth += 1
        looked_at = self._keys[: depth + 1]
        self._recent.append(looked_at)
        self._counts.update(looked_at)
        if len(self._recent) > WINDOW_REQUESTS:
            for key in self._recent.popleft():
                self._counts[key] -= 1
                if not self._counts[key]:
                    del self._counts[key]
        return looked_at[-1] if looked_at else None
