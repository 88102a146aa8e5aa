"""One replica as the router knows it: its health, its ledger, what its work costs, what it told."""

from dataclasses import dataclass, field
from typing import Final

from replica.contract.load_report import LoadReport
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from replica.contract.transfer_speed import TransferSpeed
from router.routing.block_source import BlockSettings
from router.routing.cache_guard import CacheGuard
from router.routing.calibration import DEFAULT_DECODE, DEFAULT_PREFILL, ReplicaCost
from router.routing.cost_prior import Hardware, cost_prior
from router.routing.credit import Credit
from router.routing.fair_queue import FairQueue
from router.routing.health import Health, HealthState
from router.routing.kv_route import (
    TRANSFER_FIXED_S,
    TRANSFER_REFERENCE_TOKENS,
    TRANSFER_TOKEN_S,
    KvPull,
    Role,
)
from router.routing.ledger import Booking, Ledger
from router.routing.peer_events import PromptCount
from router.routing.prompt_blocks import Prompt

SAME_STEP_S = 0.001
"""A first token that comes so soon after another of its replica is of one step with that: the seconds before
are of both, and teach together."""
PRIOR_UNTIL = 50
"""Requests after which what the replica has shown is worth more than what its model and GPU suggest."""
UNNAMED: Final = "unnamed"
"""The engine of a server that was asked and showed nothing by which we know it."""


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as the operator names it."""

    name: str
    url: str
    model: str | None = None
    weight: float = 1.0
    tags: tuple[str, ...] = ()
    blocks: BlockSettings = field(default_factory=BlockSettings)
    """What is known of its KV blocks."""
    prefill: PrefillCost = DEFAULT_PREFILL
    decode: DecodeCost = DEFAULT_DECODE
    """What its work is taken to cost until it has shown that."""
    hardware: Hardware | None = None
    """What it runs on, which says more if it is known; ``None``: the costs are the operator's word."""
    role: Role = Role.BOTH
    kv_pull: KvPull = KvPull.NONE
    """How it gets KV that another computed."""
    kv_source: str | None = None
    """HOST:PORT where it gives KV to those that pull by ``x-warmroute-kv-source``."""
    transfer_fixed_s: float = TRANSFER_FIXED_S
    transfer_token_s: float = TRANSFER_TOKEN_S
    """What pulling KV is taken to cost it until it has shown that."""
    engine: str | None = None
    """Which kind of server it is; ``None``: it is asked."""

    @property
    def moves_kv(self) -> bool:
        """It has a part in moving KV."""
        return self.role is not Role.BOTH or self.kv_pull is not KvPull.NONE


class ReplicaState:
    """The fleet alone changes it; policies and reports read it."""

    __slots__ = (
        "cost",
        "credit",
        "drain_version",
        "draining",
        "engine",
        "guard",
        "health",
        "held",
        "index",
        "kv_tokens",
        "last_report",
        "leaving",
        "ledger",
        "models",
        "name",
        "prior_source",
        "probed",
        "progress_at",
        "requests",
        "rests_until",
        "role",
        "room_price_s",
        "spec",
        "transfer",
        "weight",
    )

    def __init__(self, index: int, spec: ReplicaSpec, health: Health, cost: ReplicaCost) -> None:
        self.index = index
        self.spec = spec
        self.name = spec.name
        self.weight = spec.weight
        self.role = spec.role
        self.transfer = _transfer(spec)
        """What pulling KV takes here, by tokens."""
        self.ledger = Ledger(cost)
        self.held = FairQueue()
        self.health = health
        self.cost = cost
        self.credit = Credit()
        self.guard = CacheGuard()
        self.draining = False
        self.leaving = False
        """Taken out of the config: forgotten once nothing is in flight there."""
        self.drain_version = 0
        """How many orders about draining there were, at any router; the latest counts."""
        self.models = _models(spec)
        """Models it serves; ``None`` until it told."""
        self.engine = spec.engine
        """Which kind of server it is, ``UNNAMED`` if none that is known; ``None`` until it was asked."""
        self.last_report: LoadReport | None = None
        self.kv_tokens: int | None = None
        self.prior_source = _source(spec)
        """Where the costs come from that its work was first taken to have."""
        self.room_price_s = 0.0
        self.probed = False
        self.progress_at = 0.0
        """When it last showed that it works: a first token, more of an answer, the end of one."""
        self.requests = 0
        self.rests_until = 0.0
        """It said that it is busy: until then it gets nothing that another can take; 0: it did not."""

    @property
    def in_flight(self) -> int:
        """Requests sent and not over."""
        return self.ledger.in_flight

    @property
    def assigned(self) -> int:
        """Requests that are this replica's: sent and not over, or waiting for it in the router."""
        return self.ledger.queued + self.ledger.decoding + len(self.held)

    @property
    def outstanding_tokens(self) -> int:
        """Tokens of these: uncached ones of prompts, and of replies where the request was sent."""
        return self.ledger.outstanding_tokens + self.held.new_tokens

    def wait_s(self, prefill_s: float, prompt: Prompt | None, now: float) -> float:
        """Seconds of prefill that go before a request of ``prefill_s``, sent or held."""
        wait_s = self.ledger.backlog_s(now)
        held = self.held
        return wait_s + held.ahead_s(held.rank_s(prefill_s, prompt), prompt) if held.count else wait_s

    @property
    def usable(self) -> bool:
        """May take new work."""
        return self.serving and (self.health.state is not HealthState.PROBATION or self.in_flight == 0)

    @property
    def resting(self) -> bool:
        """It said that it is busy, and when to come again."""
        return self.rests_until > 0.0

    @property
    def serving(self) -> bool:
        """Gets work, if not always as much as the others: neither on its way out nor ejected nor unknown."""
        if self.draining or self.leaving:
            return False
        return self.health.state not in (HealthState.EJECTED, HealthState.UNKNOWN)

    def serves(self, model: str) -> bool:
        """Serves ``model``, or has not told what it serves."""
        return self.models is None or model in self.models

    def may_serve(self, model: str) -> bool:
        """As ``serves``; but one that is not there and has never told what it serves is not hoped for."""
        return self.serves(model) and not (self.models is None and self.health.unreachable)

    def respecified(self, spec: ReplicaSpec) -> None:
        """The operator says something else of the same server."""
        if spec.model != self.spec.model:
            self.models = _models(spec)
        if spec.engine != self.spec.engine:
            self.engine = spec.engine
        if _transfer_prior(spec) != _transfer_prior(self.spec):
            self.transfer = _transfer(spec)
        self.role = spec.role
        before, self.spec = self.spec, spec
        if (spec.hardware, spec.prefill, spec.decode) != (before.hardware, before.prefill, before.decode):
            self.cost.prior_given(spec.prefill, spec.decode)
            self.prior_source = _source(spec)
            self.hardware_told()
        self.weight = spec.weight

    def hardware_told(self) -> None:
        """More may be known of its model and GPU: price its work by them, if it has shown little itself."""
        hardware, report = self.spec.hardware, self.last_report
        if hardware is None or self.cost.prefills_seen >= PRIOR_UNTIL:
            return
        model = self.spec.model or (min(self.models) if self.models else None)
        prior = cost_prior(hardware, model, self.kv_tokens, report.memory_share if report else None)
        if prior is not None and prior.source != self.prior_source:
            self.cost.prior_given(prior.prefill, prior.decode)
            self.prior_source = prior.source

    def book(self, prefill_s: float, new_tokens: int, expected_output_tokens: int, now: float) -> Booking:
        """A request was sent here, by whichever router."""
        if self.ledger.queued == 0:
            self.cost.prefill_started(now)
        return self.ledger.book(prefill_s, new_tokens, expected_output_tokens, now)

    def first_token(self, booking: Booking, matched_tokens: int, now: float, *, seen: bool = True) -> None:
        """Its prefill is over. Teaches what prefill costs here, if the token was ``seen``: now, by the cached
        tokens that are believed; at the request's end, if that would be surprising."""
        self.ledger.first_token(booking, now)
        self._prefill_over(booking, now, learn=seen)
        busy_s, new_tokens, cost = booking.busy_s, booking.new_tokens, self.cost
        if busy_s is None:
            return
        if busy_s > SAME_STEP_S or now - booking.booked_at < 2.0 * SAME_STEP_S:
            cost.surprised = cost.surprising(busy_s, new_tokens, matched_tokens)
        if not cost.surprised:
            self._learn(booking, new_tokens, matched_tokens)

    def over(
        self,
        booking: Booking,
        matched_tokens: int,
        now: float,
        *,
        learn: bool,
        computed: bool = True,
        count: PromptCount | None = None,
    ) -> bool:
        """It ended. True if that was before its first token; ``learn``: its prefill took no longer.

        ``computed``: all that was not matched was; else how long it took says nothing of prefill.
        ``count``: what the replica reported of the prompt. What it still has to teach it teaches by that, or
        without by belief, also if it was broken off: else a replica whose clients ask for no usage would
        never be found to be much faster than it was taken to be.
        """
        was_queued = booking.state == Booking.QUEUED
        if not learn:
            self.ledger.take_back(booking, now)
        self.ledger.release(booking, now)
        if was_queued:
            self._prefill_over(booking, now, learn=learn and computed)
        if booking.busy_s is not None:
            if count is None:
                self._learn(booking, booking.new_tokens, matched_tokens)
            else:
                self._learn(booking, count.new_tokens, count.cached_tokens)
        return was_queued

    def _prefill_over(self, booking: Booking, now: float, *, learn: bool) -> None:
        if learn:
            booking.busy_s = self.cost.prefill_finished(now, self.ledger.queued)
        else:
            self.cost.prefill_abandoned(now, self.ledger.queued)

    def _learn(self, booking: Booking, new_tokens: int, position: int) -> None:
        busy_s, booking.busy_s = booking.busy_s, None
        assert busy_s is not None
        self.cost.prefilled(busy_s, new_tokens, position)

    def replied(self, output_tokens: int, decoding_s: float, sequences: int) -> None:
        """A whole reply: learn what a decode step costs; ``sequences`` decoded here at its end."""
        self.cost.decoded(decoding_s, output_tokens - 1, sequences)

    def drain_ordered(self, on: bool, version: int) -> bool:
        """An operator's order, given at some router. True if it changes anything; the cautious wins a tie."""
        if version < self.drain_version or (version == self.drain_version and not on):
            return False
        self.drain_version = version
        changed, self.draining = self.draining is not on, on
        return changed

    def reported(self, report: LoadReport) -> None:
        """Its own gauges. KV room costs nothing up to 80% in use, rising to one second when full."""
        self.last_report = report
        usage = report.kv_usage
        self.guard.reported(usage)
        self.room_price_s = 0.0 if usage is None else min(1.0, max(0.0, (usage - 0.8) / 0.2))


def _transfer_prior(spec: ReplicaSpec) -> tuple[float, float]:
    return spec.transfer_fixed_s, spec.transfer_token_s


def _transfer(spec: ReplicaSpec) -> TransferSpeed:
    fixed_s, token_s = _transfer_prior(spec)
    return TransferSpeed(fixed_s, 1.0 / token_s, reference=TRANSFER_REFERENCE_TOKENS)


def _models(spec: ReplicaSpec) -> frozenset[str] | None:
    return frozenset({spec.model}) if spec.model else None


def _source(spec: ReplicaSpec) -> str:
    return "default" if spec.hardware is not None else "given"
