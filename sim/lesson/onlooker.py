"""A policy that may be misinformed, beside itself with the right numbers: which decisions change, and why?

The rule under test decides on what it is shown: an index that may be late, ledgers that may be old. At the
same moment the same rule is asked again with what the caches really hold and what was really sent. Where the
two answers differ, the wrong numbers made the difference.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from replica.contract.load_report import LoadReport
from router.routing.block_source import BlockSettings
from router.routing.decision import Assessment, Decision
from router.routing.exact_index import ExactIndex, Expectation
from router.routing.in_flight import InFlight
from router.routing.policies.own_delay import decide_by_load
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import Policy, RoutingRequest
from sim.lesson.shown_candidates import FrozenLedgers, shown
from sim.watcher import Watcher


@dataclass(frozen=True, slots=True)
class Moment:
    """One decision of the burst, as it was made and as the right numbers would have made it."""

    now: float
    prompt: Prompt
    seen: list[Assessment]
    """What every candidate seemed to cost."""
    right: list[Assessment]
    """What it really cost."""
    decided: int
    """Replica."""
    rightly: int
    """The replica that the right numbers point to."""
    metrics_age_s: float | None
    """Without reservations: how old the figures were."""


class Onlooker(Watcher):
    """Before ``from_s`` requests go to each candidate in turn; from then on ``make``'s rule decides."""

    samples = False

    def __init__(
        self,
        make: Callable[[random.Random], Policy],
        rng: random.Random,
        *,
        from_s: float,
        replicas: int,
        block_tokens: int,
        reservations: bool,
        metrics_every_s: float = 1.0,
    ) -> None:
        self.metrics_every_s = None if reservations else metrics_every_s
        self.moments: list[Moment] = []
        self._rng, self._informed_rng = rng, random.Random()
        self._rule = make(self._rng)
        self._well_informed = make(self._informed_rng)
        self._watchers = [one for one in (self._rule, self._well_informed) if isinstance(one, Watcher)]
        self._from_s = from_s
        self._frozen = None if reservations else FrozenLedgers()
        self._truth = ExactIndex([BlockSettings("warmroute", block_tokens)] * replicas, 1)
        self._expected: dict[InFlight, Expectation] = {}
        self._prompt: Prompt | None = None
        self._turn = 0

    # --- the truth --------------------------------------------------------------------------------

    def cache_changed(self, replica: int, events: Sequence[CacheEvent]) -> None:
        """A replica's cache changed, just now."""
        for event in events:
            if isinstance(event, BlocksStored):
                self._truth.stored(replica, event)
            elif isinstance(event, BlocksRemoved):
                self._truth.removed(replica, event)

    def arriving(self, prompt: Prompt) -> None:
        """Remember whose prompt is asked about."""
        self._prompt = prompt
        for watcher in self._watchers:
            watcher.arriving(prompt)

    def sent(self, flight: InFlight, now: float) -> None:
        """Its blocks will be there."""
        chains = flight.prompt.chains
        assert chains is not None
        expectation = self._truth.sent(flight.replica.index, chains, flight.decision.matched_tokens)
        if expectation is not None:
            self._expected[flight] = expectation
        for watcher in self._watchers:
            watcher.sent(flight, now)

    def first_token(self, flight: InFlight, now: float) -> None:
        """Passed on."""
        for watcher in self._watchers:
            watcher.first_token(flight, now)

    def over(self, flight: InFlight, now: float) -> None:
        """Its blocks are there, or not: the events tell."""
        expectation = self._expected.pop(flight, None)
        if expectation is not None:
            self._truth.over(expectation, computed=True)
        for watcher in self._watchers:
            watcher.over(flight, now)

    def measured(
        self, replicas: Sequence[ReplicaState], reports: Sequence[LoadReport | None], now: float
    ) -> None:
        """Metrics were read."""
        if self._frozen is not None:
            self._frozen.read(replicas, now)

    # --- decisions --------------------------------------------------------------------------------

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """In turn before the burst; then what the rule makes of what it is shown."""
        if request.now < self._from_s:
            self._turn += 1
            return decide_by_load(request, candidates[self._turn % len(candidates)])
        now, frozen = request.now, self._frozen
        as_they_are = [shown(c, c.ledger) for c in candidates]
        as_shown, age_s = as_they_are, None
        if frozen is not None:
            as_shown = [shown(c, frozen.ledger(c.index, now)) for c in candidates]
            age_s = now - frozen.read_at_s
        seen = self._rule.assess(request, as_shown)
        self._informed_rng.setstate(self._rng.getstate())  # a tie that falls otherwise is no wrong number's
        decided = self._rule.choose(request, as_shown)
        informed = self._informed(request)
        right = self._well_informed.assess(informed, as_they_are)
        rightly = self._well_informed.choose(informed, as_they_are)
        assert self._prompt is not None
        self.moments.append(
            Moment(request.now, self._prompt, seen, right, decided.replica, rightly.replica, age_s)
        )
        return decided

    def _informed(self, request: RoutingRequest) -> RoutingRequest:
        """The same request with what the caches really hold, and what is on its way to them."""
        assert self._prompt is not None and self._prompt.chains is not None
        matched = [0] * len(request.matched_tokens)
        for mask, tokens in self._truth.levels(self._prompt.chains, self._prompt.units):
            for replica in range(len(matched)):
                if mask >> replica & 1:
                    matched[replica] = tokens
        return RoutingRequest(
            request.now,
            request.prompt_tokens,
            matched,
            request.session,
            arrivals_per_replica_s=request.arrivals_per_replica_s,
            fleet_utilization=request.fleet_utilization,
            decode_price=request.decode_price,
            expected_output_tokens=request.expected_output_tokens,
        )

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """As the rule is shown things."""
        return self._rule.assess(request, candidates)
