"""The fleet: every replica's state, and the past-tense events that change it.

The proxy and the simulator raise the same events: ``sent``, ``first_token``, ``finished``, ``failed``,
``cancelled``, ``load_reported``, the probes' and the operator's. Between reading and changing there is no
``await``, so nothing here needs a lock. Time comes in as ``now`` (seconds, any monotonic clock).
"""

import random
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from math import exp

from replica.contract.load_report import LoadReport
from router.routing.calibration import FleetSpeed, ReplicaCost, TokenRatio
from router.routing.decision import Assessment, Decision, NoReplica, Reason
from router.routing.health import Health, HealthSettings, HealthState
from router.routing.ledger import UTILIZATION_REFRESH_S, Booking, Ledger
from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import TEXT_LAYOUT, BlockLayout, Prompt
from router.routing.retry import Failure
from router.routing.view import Policy, RoutingRequest

ARRIVALS_WINDOW_S = 20.0
AVERAGE_OVER_REQUESTS = 200
MODELS_REMEMBERED = 256
ROUTE_KEY_TOKENS = 1_024


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as the operator names it."""

    name: str
    url: str
    model: str | None = None
    weight: float = 1.0
    tags: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What the routing core needs from the config; times in seconds."""

    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    default_capacity_tokens: int = 1_000_000
    """KV tokens a replica is taken to hold until it says."""
    expected_output_tokens: float = 256.0
    """Reply length assumed before any was seen."""
    health: HealthSettings = field(default_factory=HealthSettings)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a replica reported about a finished request; ``None`` is "not told"."""

    prompt_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None


class ReplicaState:
    """One replica. The fleet alone changes it; policies and reports read it (``view.Candidate``)."""

    __slots__ = (
        "cost",
        "draining",
        "health",
        "index",
        "kv_tokens",
        "last_report",
        "ledger",
        "models",
        "name",
        "probed",
        "requests",
        "room_price_s",
        "spec",
        "weight",
    )

    def __init__(self, index: int, spec: ReplicaSpec, health: Health, cost: ReplicaCost) -> None:
        self.index = index
        self.spec = spec
        self.name = spec.name
        self.weight = spec.weight
        self.room_price_s = 0.0
        self.ledger = Ledger()
        self.health = health
        self.cost = cost
        self.draining = False
        self.models: frozenset[str] | None = frozenset({spec.model}) if spec.model else None
        self.last_report: LoadReport | None = None
        self.kv_tokens: int | None = None
        self.probed = False
        self.requests = 0

    @property
    def in_flight(self) -> int:
        """Requests sent and not over."""
        return self.ledger.in_flight

    @property
    def usable(self) -> bool:
        """May take new work."""
        if self.draining or self.health.state is HealthState.EJECTED:
            return False
        return self.health.state is not HealthState.PROBATION or self.in_flight == 0


class InFlight:
    """One request on one replica, from dispatch to its last byte. Owned by the fleet."""

    __slots__ = (
        "booking",
        "decision",
        "first_token_at",
        "predicted_first_token_at",
        "prompt",
        "replica",
        "sent_at",
    )

    def __init__(
        self,
        prompt: Prompt,
        decision: Decision,
        replica: ReplicaState,
        booking: Booking,
        now: float,
        expected: float,
    ) -> None:
        self.prompt = prompt
        self.decision = decision
        self.replica = replica
        self.booking = booking
        self.sent_at = now
        self.first_token_at: float | None = None
        self.predicted_first_token_at = expected

    @property
    def over(self) -> bool:
        """Finished, failed or cancelled."""
        return self.booking.state == Booking.RELEASED


class Fleet:
    """Replicas, what they hold, what they have to do, and the policy that chooses among them."""

    def __init__(
        self,
        replicas: Iterable[ReplicaSpec],
        policy: Policy,
        settings: FleetSettings,
        *,
        rng: random.Random,
        layout: BlockLayout = TEXT_LAYOUT,
        tokens_per_unit: float = 0.25,
        use_index: bool = True,
    ) -> None:
        self.policy = policy
        self.settings = settings
        self.speed = FleetSpeed()
        self.replicas: list[ReplicaState] = [
            ReplicaState(index, spec, Health(settings.health), ReplicaCost(self.speed))
            for index, spec in enumerate(replicas)
        ]
        self.token_ratio = TokenRatio(tokens_per_unit)
        self._learn_ratio = layout is TEXT_LAYOUT
        self.index = PrefixIndex(
            len(self.replicas), layout, int(settings.default_capacity_tokens / tokens_per_unit)
        )
        self._use_index = use_index
        self._rng = rng
        self._usable_by_model: dict[str | None, list[ReplicaState]] = {}
        """Candidates by model asked for; emptied when any replica's health, models or draining change."""
        self._arrivals = 0.0
        self._arrivals_at = 0.0
        self._mean_utilization = 0.0
        self._mean_utilization_at = -UTILIZATION_REFRESH_S
        self._mean_output_tokens = settings.expected_output_tokens
        self._mean_slo_ttft_s = settings.slo_ttft_s
        self._finished_seen = 0
        self._unseen_first_tokens: list[tuple[float, int, InFlight]] = []
        self._sent = 0
        self.spills = 0
        self.saved_s = 0.0

    # --- deciding -------------------------------------------------------------------------------

    def decide(
        self, prompt: Prompt, now: float, *, tried: Collection[int] = (), session: str | None = None
    ) -> Decision:
        """Where ``prompt`` goes. Changes nothing but the arrival rate; raises ``NoReplica``."""
        candidates, panic = self._candidates(prompt.model, tried)
        self._expect_first_tokens(now)
        request = self._request(prompt, now, session)
        if len(candidates) == 1:
            decision = self._only(request, candidates[0])
        else:
            decision = self.policy.choose(request, candidates)
        if tried:
            return decision._replace(reason=Reason.RETRY)
        return decision._replace(reason=Reason.PANIC) if panic else decision

    def explain(
        self, prompt: Prompt, now: float, *, session: str | None = None
    ) -> tuple[Decision, list[Assessment], RoutingRequest]:
        """The decision, what every candidate would cost, and the figures behind the prices."""
        candidates, _ = self._candidates(prompt.model, ())
        self._expect_first_tokens(now)
        request = self._request(prompt, now, session)
        assessments = self.policy.assess(request, candidates)
        if len(candidates) == 1:
            return self._only(request, candidates[0]), assessments, request
        return self.policy.choose(request, candidates), assessments, request

    def _candidates(self, model: str | None, tried: Collection[int]) -> tuple[Sequence[ReplicaState], bool]:
        """Usable replicas that serve ``model`` and were not tried; all of them in a panic."""
        if not tried:
            known = self._usable_by_model.get(model)
            if known is not None:
                return known, False
        usable = [replica for replica in self.replicas if replica.usable]
        if tried:
            usable = [replica for replica in usable if replica.index not in tried]
        if model is not None:
            fit = [replica for replica in usable if self._serves(replica, model)]
            if not fit and usable and not tried and not any(self._serves(r, model) for r in self.replicas):
                raise NoReplica("unknown_model", f"no replica serves the model {model!r}")
            usable = fit
        if usable:
            if not tried and not any(r.health.state is HealthState.PROBATION for r in self.replicas):
                if len(self._usable_by_model) >= MODELS_REMEMBERED:
                    self._usable_by_model.clear()
                self._usable_by_model[model] = usable
            return usable, False
        if not tried:
            # Panic: when every replica is ejected the probes may be wrong; trying beats refusing.
            panic = [r for r in self.replicas if not r.draining and (model is None or self._serves(r, model))]
            if panic:
                return panic, True
        raise NoReplica("none_usable", "no replica can take the request")

    @staticmethod
    def _serves(replica: ReplicaState, model: str) -> bool:
        return replica.models is None or model in replica.models

    def _request(self, prompt: Prompt, now: float, session: str | None) -> RoutingRequest:
        ratio = self.token_ratio.tokens_per_unit
        prompt_tokens = max(1, int(prompt.units * ratio))
        keys = prompt.keys
        if self._use_index and keys:
            matched = self.index.match(keys)
            end = prompt.layout.end
            # The last token is always computed, so a hit is never the whole prompt. Depths repeat.
            tokens = {blocks: min(prompt_tokens - 1, int(end(blocks) * ratio)) for blocks in set(matched)}
            matched = [tokens[blocks] for blocks in matched]
        else:
            matched = [0] * len(self.replicas)
        route_key = None
        if keys:
            depth = prompt.layout.blocks(int(ROUTE_KEY_TOKENS / ratio)) or 1
            route_key = keys[(depth if depth < len(keys) else len(keys)) - 1]
        return RoutingRequest(
            now,
            prompt_tokens,
            matched,
            session,
            route_key,
            self.arrivals_per_s(now) / len(self.replicas),
            self._utilization(now),
            self.decode_price,
            self._expected_output(prompt),
        )

    def _utilization(self, now: float) -> float:
        """Mean share of the last minute that prefill fills; counted again every quarter of a second."""
        if now - self._mean_utilization_at > UTILIZATION_REFRESH_S:
            self._mean_utilization_at = now
            self._mean_utilization = sum(r.ledger.utilization(now) for r in self.replicas) / len(
                self.replicas
            )
        return self._mean_utilization

    @staticmethod
    def _only(request: RoutingRequest, candidate: ReplicaState) -> Decision:
        matched = request.matched_tokens[candidate.index]
        prefill = candidate.cost.prefill_s(request.prompt_tokens - matched, matched)
        cold = candidate.cost.prefill_s(request.prompt_tokens, 0) if matched else prefill
        return Decision(
            candidate.index,
            Reason.ONLY,
            matched,
            candidate.ledger.backlog_s(request.now),
            prefill,
            cold - prefill,
        )

    def _expected_output(self, prompt: Prompt) -> float:
        expected = self._mean_output_tokens
        return min(expected, float(prompt.max_tokens)) if prompt.max_tokens else expected

    @property
    def decode_price(self) -> float:
        """κ = E[TTFT allowed] / (decode time allowed for the mean reply), both from the SLOs."""
        settings = self.settings
        return self._mean_slo_ttft_s / (settings.slo_ttft_s + settings.slo_tpot_s * self._mean_output_tokens)

    def arrivals_per_s(self, now: float) -> float:
        """Requests sent per second, averaged over about 20 s."""
        return self._arrivals * exp((self._arrivals_at - now) / ARRIVALS_WINDOW_S) / ARRIVALS_WINDOW_S

    def _expect_first_tokens(self, now: float) -> None:
        """Requests that show no first token (not streamed) are taken to have it when predicted."""
        unseen = self._unseen_first_tokens
        while unseen and unseen[0][0] <= now:
            at, _, flight = heappop(unseen)
            if flight.booking.state == Booking.QUEUED:
                flight.replica.ledger.first_token(flight.booking, at)
                flight.replica.cost.prefill_abandoned(now, flight.replica.ledger.queued)

    # --- a request's life -----------------------------------------------------------------------

    def sent(self, prompt: Prompt, decision: Decision, now: float) -> InFlight:
        """The request goes to ``decision.replica``: its work is booked, its blocks will be there."""
        replica = self.replicas[decision.replica]
        tokens = max(1, int(prompt.units * self.token_ratio.tokens_per_unit))
        expected_output = self._expected_output(prompt)
        if replica.ledger.queued == 0:
            replica.cost.prefill_started(now)
        booking = replica.ledger.book(
            decision.prefill_s, tokens - decision.matched_tokens, int(expected_output), now
        )
        expected = now + replica.ledger.backlog_s(now)
        flight = InFlight(prompt, decision, replica, booking, now, expected)
        self._sent += 1
        replica.requests += 1
        if not prompt.stream:
            heappush(self._unseen_first_tokens, (expected, self._sent, flight))
        if self._use_index and prompt.keys:
            self.index.insert(replica.index, prompt.keys)
        if decision.reason is not Reason.RETRY:
            self._arrived(now, replica.cost.prefill_s(tokens, 0))
            self.saved_s += decision.saved_s
            if decision.reason is Reason.SPILL:
                self.spills += 1
        return flight

    def _arrived(self, now: float, cold_s: float) -> None:
        elapsed = now - self._arrivals_at
        if elapsed > 0.0:
            self._arrivals *= exp(-elapsed / ARRIVALS_WINDOW_S)
            self._arrivals_at = now
        self._arrivals += 1.0
        allowed = self.settings.slo_ttft_s + cold_s
        self._mean_slo_ttft_s += (allowed - self._mean_slo_ttft_s) / AVERAGE_OVER_REQUESTS

    def first_token(self, flight: InFlight, now: float) -> None:
        """The first event with content was seen (streamed requests)."""
        if flight.booking.state == Booking.RELEASED or flight.first_token_at is not None:
            return
        flight.first_token_at = now
        replica, decision = flight.replica, flight.decision
        if flight.booking.state == Booking.QUEUED:
            replica.ledger.first_token(flight.booking, now)
            replica.cost.prefill_finished(
                now, flight.booking.new_tokens, decision.matched_tokens, replica.ledger.queued
            )

    def finished(self, flight: InFlight, now: float, usage: Usage | None = None) -> None:
        """The last byte was passed on. Learns from ``usage`` and from how long it took."""
        replica = flight.replica
        sequences = replica.ledger.decoding
        was_queued = flight.booking.state == Booking.QUEUED
        if not replica.ledger.release(flight.booking, now):
            return
        if was_queued:
            replica.cost.prefill_abandoned(now, replica.ledger.queued)
        self._request_succeeded(replica)
        if usage is None:
            return
        if usage.output_tokens is not None:
            self._mean_output_tokens += (
                usage.output_tokens - self._mean_output_tokens
            ) / AVERAGE_OVER_REQUESTS
            if flight.first_token_at is not None:
                # Prefills beside it stalled this stream for about their share of the time. Policies divide
                # a step by 1 - utilization, so what is learned must be the step without the stalls.
                decoding_s = (now - flight.first_token_at) * (1.0 - replica.ledger.utilization(now))
                replica.cost.decoded(decoding_s, usage.output_tokens - 1, sequences)
        if usage.prompt_tokens is not None and self._learn_ratio:
            self.token_ratio.learn(usage.prompt_tokens, flight.prompt.units)
        if usage.cached_tokens is not None and usage.prompt_tokens is not None:
            self._check_credit(flight, usage.prompt_tokens, usage.cached_tokens)

    def _request_succeeded(self, replica: ReplicaState) -> None:
        if replica.health.state is not HealthState.HEALTHY:
            self._usable_by_model.clear()
        replica.health.request_succeeded()

    def _check_credit(self, flight: InFlight, prompt_tokens: int, cached_tokens: int) -> None:
        """Nothing cached where much was believed: the replica lost its cache (restart, reset)."""
        matched = flight.decision.matched_tokens
        if cached_tokens == 0 and matched >= 512 and matched >= prompt_tokens // 2:
            self.index.clear(flight.replica.index)
            self.index.insert(flight.replica.index, flight.prompt.keys)

    def failed(self, flight: InFlight, now: float, failure: Failure) -> None:
        """The attempt failed by the replica's fault; what it was believed to store is withdrawn."""
        replica = flight.replica
        if not self._end_early(flight, now):
            return
        if failure is Failure.BUSY:
            return  # busy is not broken
        if failure is Failure.CONNECT:
            replica.health.connect_failed(now)
            self._usable_by_model.clear()
            self.index.clear(replica.index)  # nobody is there: its cache is gone with it
        else:
            replica.health.request_failed(now)
            self._usable_by_model.clear()

    def refused(self, flight: InFlight, now: float) -> None:
        """The replica answered 4xx: the client's fault, the replica is well and stored nothing."""
        if self._end_early(flight, now):
            self._request_succeeded(flight.replica)

    def cancelled(self, flight: InFlight, now: float) -> None:
        """The client left. Nobody's fault."""
        self._end_early(flight, now)

    def _end_early(self, flight: InFlight, now: float) -> bool:
        """Release the booking; blocks that were never computed are no longer believed to be there."""
        replica = flight.replica
        was_queued = flight.booking.state == Booking.QUEUED
        if not replica.ledger.release(flight.booking, now):
            return False
        if was_queued:
            replica.cost.prefill_abandoned(now, replica.ledger.queued)
            self._withdraw(flight)
        return True

    def _withdraw(self, flight: InFlight) -> None:
        prompt = flight.prompt
        if not self._use_index or not prompt.keys:
            return
        ratio = self.token_ratio.tokens_per_unit
        blocks = prompt.layout.blocks(int((flight.decision.matched_tokens + 1) / ratio))
        self.index.truncate(flight.replica.index, prompt.keys, blocks)

    # --- what replicas tell, what the operator wants ---------------------------------------------

    def load_reported(self, replica: int, report: LoadReport, now: float) -> None:
        """A replica's own gauges. They bound the index; they never replace the ledger."""
        state = self.replicas[replica]
        state.last_report = report
        usage = report.kv_usage
        # 0 below 80% of KV in use, rising to one second when full.
        state.room_price_s = 0.0 if usage is None else min(1.0, max(0.0, (usage - 0.8) / 0.2))
        if report.capacity_tokens and report.capacity_tokens != state.kv_tokens:
            state.kv_tokens = report.capacity_tokens
            self.index.set_capacity(replica, int(report.capacity_tokens / self.token_ratio.tokens_per_unit))

    def probe_succeeded(self, replica: int, now: float) -> None:
        """The replica answered its probe."""
        state = self.replicas[replica]
        state.probed = True
        before = state.health.state
        state.health.probe_succeeded(now)
        if state.health.state is not before:
            self._usable_by_model.clear()

    def models_reported(self, replica: int, models: frozenset[str]) -> None:
        """The names of the models the replica serves."""
        if self.replicas[replica].models != models:
            self.replicas[replica].models = models
            self._usable_by_model.clear()

    def probe_failed(self, replica: int, now: float, *, refused: bool = False) -> None:
        """The replica did not answer its probe; ``refused``: nobody listens there."""
        state = self.replicas[replica]
        if refused:
            state.health.connect_failed(now)
            self.index.clear(replica)
        else:
            state.health.probe_failed(now)
        self._usable_by_model.clear()
        state.probed = True

    def drained(self, replica: int, *, on: bool = True) -> None:
        """The operator takes the replica out of new work (``on``) or gives it back."""
        self.replicas[replica].draining = on
        self._usable_by_model.clear()

    @property
    def ready(self) -> bool:
        """At least one replica has been reached and may take work."""
        return any(replica.usable and replica.probed for replica in self.replicas)
