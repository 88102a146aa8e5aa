"""The fleet: every replica's state, and the past-tense events that change it.

The proxy and the simulator raise the same events: ``sent``, ``first_token``, ``finished``, ``failed``,
``cancelled``, ``load_reported``, ``blocks_stored`` and the other KV events, the probes' and the operator's,
``replica_added`` and ``replica_removed`` among these.
Between reading and changing there is no ``await``, so nothing here needs a lock. Time comes in as ``now``
(seconds, any monotonic clock).
"""

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.contract.load_report import LoadReport
from router.routing.cache_beliefs import CacheBeliefs
from router.routing.calibration import FleetSpeed, ReplicaCost
from router.routing.decision import Assessment, Decision, NoReplica, Reason
from router.routing.health import Health, HealthSettings, HealthState
from router.routing.hold import Held
from router.routing.hot_prefixes import HotPrefixes
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import Journal
from router.routing.ledger import UTILIZATION_REFRESH_S, Booking
from router.routing.peer_events import Reply
from router.routing.peers import Peers
from router.routing.prompt_blocks import TEXT_LAYOUT, BlockLayout, Prompt
from router.routing.replica_state import ReplicaSpec, ReplicaState
from router.routing.retry import Failure
from router.routing.roster import Roster
from router.routing.shortlist import PRICE_ALL_UP_TO, Shortlist
from router.routing.traffic import Traffic
from router.routing.view import MatchedTokens, Policy, RoutingRequest

DEADLINE_SLOS = 5.0
"""A held request goes first once it has waited so many times its allowed time to first token."""
GIVE_UP_SLOS = 10.0
"""A replica that shows nothing for so many allowed times beyond its predictions is waited for no longer."""
PEERS_TURN_S = 0.1
"""While a replica has nothing to prefill, another router's request that goes first is waited for so long."""


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """What the routing core needs from the config; times in seconds."""

    slo_ttft_s: float = 1.0
    slo_tpot_s: float = 0.05
    default_capacity_tokens: int = 1_000_000
    """KV tokens a replica is taken to hold until it says."""
    expected_output_tokens: float = 256.0
    """Reply length assumed before any was seen."""
    hold: bool = False
    """Requests wait in the router while their replica has one without a first token (``hold.py``)."""
    exact: bool = False
    """Prompts read token by token will come (``exact_index.py``)."""
    health: HealthSettings = field(default_factory=HealthSettings)


class Fleet:
    """Replicas, what they hold, what they have to do, and the policy that chooses among them."""

    def __init__(
        self,
        replicas: Iterable[ReplicaSpec],
        policy: Policy,
        settings: FleetSettings,
        *,
        rng: random.Random | None = None,
        layout: BlockLayout = TEXT_LAYOUT,
        tokens_per_unit: float = 0.25,
        use_index: bool = True,
    ) -> None:
        self.policy = policy
        self.selectable: Mapping[str, Policy] = {}
        """Others, by kind, that a request may ask for."""
        self.settings = settings
        self.speed = FleetSpeed()
        self.replicas = Roster()
        for spec in replicas:
            self._join(spec, HealthState.HEALTHY)  # with no other to ask instead, they are believed
        self.caches = CacheBeliefs(
            [replica.spec.blocks for replica in self.replicas],
            layout=layout,
            tokens_per_unit=tokens_per_unit,
            capacity_tokens=settings.default_capacity_tokens,
            use_index=use_index,
            exact=settings.exact,
        )
        self.index, self.token_ratio = self.caches.text, self.caches.token_ratio
        self._learn_ratio = layout is TEXT_LAYOUT
        self._shortlist = Shortlist(self.replicas, rng or random.Random(0))
        self.traffic = Traffic(settings.slo_ttft_s, settings.slo_tpot_s, settings.expected_output_tokens)
        self._hot = HotPrefixes(self.caches, self.replicas, window_s=settings.slo_ttft_s)
        self._mean_utilization = 0.0
        self._mean_utilization_at = -UTILIZATION_REFRESH_S
        self.held = 0
        """Requests that wait in the router."""
        self.outbox: list[Held] = []
        """Held requests that were sent since the caller last looked; it empties this."""
        self._unseen_first_tokens: list[tuple[float, int, InFlight]] = []
        self._sent = 0
        self.spills = 0
        self.saved_s = 0.0
        self.journal: Journal | None = None
        """Set where other routers are told what happens here."""
        self.peers = Peers(
            self.replicas,
            self.caches,
            self.traffic,
            self._hot,
            queue_changed=self._peers_changed,
            drained=self._health_changed,
        )

    # --- deciding -------------------------------------------------------------------------------

    def decide(
        self,
        prompt: Prompt,
        now: float,
        *,
        tried: Collection[int] = (),
        session: str | None = None,
        policy: str | None = None,
    ) -> Decision:
        """Where ``prompt`` goes, by the ``selectable`` policy it asks for if it is one.

        Changes nothing but what is counted of arrivals; raises ``NoReplica``.
        """
        rule = self._rule(policy)
        found = self.replicas.candidates(prompt.model, tried)
        self._expect_first_tokens(now)
        levels = self.caches.levels(prompt)
        request = self._request(prompt, now, session, levels)
        if levels and (work_s := self._hot.price(request, prompt, levels)) is not None and not tried:
            keys = self._hot.asked(prompt, levels, work_s, now)
            if self.journal is not None:
                self.journal.prefixes_asked(keys, work_s)
        candidates: Sequence[ReplicaState] = found.replicas
        if len(candidates) > PRICE_ALL_UP_TO and rule.samples:
            candidates = self._shortlist.draw(candidates, found.bits, levels)
        if len(candidates) == 1:
            decision = self._only(request, candidates[0])
        else:
            decision = rule.choose(request, candidates)
        if tried:
            return decision._replace(reason=Reason.RETRY)
        return decision._replace(reason=Reason.PANIC) if found.panic else decision

    def _rule(self, policy: str | None) -> Policy:
        return self.policy if policy is None else self.selectable.get(policy, self.policy)

    def explain(
        self, prompt: Prompt, now: float, *, session: str | None = None, policy: str | None = None
    ) -> tuple[Decision, list[Assessment], RoutingRequest]:
        """The decision, what every candidate would cost, and the figures behind the prices."""
        candidates = self.replicas.candidates(prompt.model, ()).replicas
        self._expect_first_tokens(now)
        levels = self.caches.levels(prompt)
        request = self._request(prompt, now, session, levels)
        if levels:
            self._hot.price(request, prompt, levels)
        rule = self._rule(policy)
        assessments = rule.assess(request, candidates)
        if len(candidates) == 1:
            return self._only(request, candidates[0]), assessments, request
        # A copy decides: asking must not advance a turn or a random generator.
        return rule.copy().choose(request, candidates), assessments, request

    def _request(
        self, prompt: Prompt, now: float, session: str | None, levels: list[tuple[int, int]]
    ) -> RoutingRequest:
        ratio = self.caches.tokens_per_unit(prompt)
        count = self.replicas.slots
        matched: Sequence[int]
        if count > PRICE_ALL_UP_TO:
            matched = MatchedTokens(levels, count)
        else:
            matched = by_replica = [0] * count
            for mask, tokens in levels:
                while mask:
                    low = mask & -mask
                    by_replica[low.bit_length() - 1] = tokens
                    mask ^= low
        return RoutingRequest(
            now,
            max(1, int(prompt.units * ratio)),
            matched,
            session,
            prompt,
            ratio,
            self.traffic.arrivals_per_s(now) / (len(self.replicas.serving) or 1),
            self._utilization(now),
            self.traffic.decode_price,
            self._expected_output(prompt),
        )

    def _utilization(self, now: float) -> float:
        """Mean share of the last minute that prefill fills on replicas that get work; counted again every
        quarter of a second, and what idle replicas showed of their speed counts a little less.
        """
        if now - self._mean_utilization_at > UTILIZATION_REFRESH_S:
            self._mean_utilization_at = now
            serving = self.replicas.serving
            self._mean_utilization = sum(r.ledger.utilization(now) for r in serving) / (len(serving) or 1)
            for replica in serving:
                replica.cost.fade(now)
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
        expected = self.traffic.output_tokens
        return min(expected, float(prompt.max_tokens)) if prompt.max_tokens else expected

    def _expect_first_tokens(self, now: float) -> None:
        """Requests that show no first token (not streamed) are taken to have it when predicted."""
        unseen = self._unseen_first_tokens
        while unseen and unseen[0][0] <= now:
            at, _, flight = heappop(unseen)
            if flight.booking.state == Booking.QUEUED:
                flight.replica.first_token(flight.booking, flight.decision.matched_tokens, at, seen=False)
                if self.journal is not None:
                    self.journal.first_token(flight, seen=False)
                self._send_held(flight.replica, now)

    # --- holding --------------------------------------------------------------------------------

    def submit(
        self,
        prompt: Prompt,
        now: float,
        *,
        session: str | None = None,
        policy: str | None = None,
        context: object = None,
    ) -> InFlight | Held:
        """Decide and send, or hold; what another policy chose is not held. Raises ``NoReplica``.

        A ``Held`` appears in ``outbox`` when its turn comes: sent, with its ``flight`` set, or with none when
        no replica is left. Whoever raises events looks there afterwards.
        """
        decision = self.decide(prompt, now, session=session, policy=policy)
        replica = self.replicas[decision.replica]
        holds = self.settings.hold and self._rule(policy) is self.policy
        if not holds or self._may_send(replica, decision.prefill_s, now):
            return self.sent(prompt, decision, now)
        tokens = max(1, int(prompt.units * self.caches.tokens_per_unit(prompt)))
        allowed = self.settings.slo_ttft_s + replica.cost.prefill_s(tokens, 0)
        held = Held(prompt, decision, decision.prefill_s, now + DEADLINE_SLOS * allowed, session, context)
        self._hold(replica, held, now)
        return held

    def _hold(self, replica: ReplicaState, held: Held, now: float) -> None:
        held.prefill_s = held.decision.prefill_s
        if self.journal is not None:
            self.journal.held(held, replica, now)
        replica.held.add(held)
        self.held += 1
        # Its siblings should come here, too.
        held.expectation = self.caches.sent(replica.index, held.prompt, held.decision.matched_tokens)

    @staticmethod
    def _may_send(replica: ReplicaState, prefill_s: float, now: float) -> bool:
        """The replica has nothing without a first token, or so little that one step computes both."""
        if not replica.ledger.queued and (first := replica.held.next(now)) is not None:
            return not first.own and prefill_s < first.prefill_s and now < first.deadline
        return Fleet._has_room(replica, prefill_s)

    @staticmethod
    def _has_room(replica: ReplicaState, prefill_s: float) -> bool:
        ledger = replica.ledger
        return not ledger.queued or (
            ledger.queued_prefill_s + prefill_s <= replica.cost.step_s(ledger.decoding)
        )

    def _send_held(self, replica: ReplicaState, now: float) -> None:
        """The replica may have room: send whose turn it is."""
        if not replica.ledger.queued:
            self._shortlist.became_idle(replica.index)
        queue = replica.held
        while (held := queue.next(now)) is not None:
            if not self._has_room(replica, held.prefill_s):
                return
            if not held.own:
                if replica.ledger.idle_s(now) < PEERS_TURN_S:
                    return  # its router sends it
                mine = queue.next_own(now)
                if mine is None:
                    return
                held = mine
            queue.remove(held)
            self.held -= 1
            self._hold_ended(held)
            held.flight = self.sent(held.prompt, held.decision, now)
            held.flight.settled = False  # what it was believed to find is from when it was held
            self.outbox.append(held)

    def _rehome(self, replica: ReplicaState, now: float) -> None:
        """The replica takes no more work, or shows nothing: whoever waits for it is decided again.

        Those who get another replica may have to wait for that one; those who get this one again are sent.
        """
        waiting = []
        while (held := replica.held.next_own(now)) is not None:
            replica.held.remove(held)
            waiting.append(held)
        for held in waiting:
            self.held -= 1
            self._hold_ended(held, withdrawn=True)
            try:
                held.decision = self.decide(held.prompt, now, session=held.session)
            except NoReplica:
                held.flight = None
                self.outbox.append(held)
                continue
            other = self.replicas[held.decision.replica]
            if other is not replica and not self._may_send(other, held.decision.prefill_s, now):
                self._hold(other, held, now)
                continue
            held.flight = self.sent(held.prompt, held.decision, now)
            self.outbox.append(held)

    def dropped(self, held: Held, now: float) -> None:
        """The client left while its request was held: no trace is left."""
        replica = self.replicas[held.decision.replica]
        replica.held.remove(held)
        self.held -= 1
        if self.journal is not None:
            self.journal.hold_ended(held, withdrawn=True)
        self.caches.withdrawn(replica.index, held.prompt, held.decision.matched_tokens, held.expectation)

    def _hold_ended(self, held: Held, *, withdrawn: bool = False) -> None:
        """It goes out now, and is expected anew where it goes; ``withdrawn``: that may be elsewhere."""
        if self.journal is not None:
            self.journal.hold_ended(held, withdrawn=withdrawn)
        expectation = held.expectation
        if expectation is not None:
            held.expectation = None
            self.caches.withdrawn(
                held.decision.replica, held.prompt, held.decision.matched_tokens, expectation
            )

    def tick(self, now: float) -> None:
        """Time passed: requests that are not streamed may have made room, silent replicas are given up on.

        Call it often while ``held`` is not zero.
        """
        self._expect_first_tokens(now)
        if self.held:
            patience_s = GIVE_UP_SLOS * self.settings.slo_ttft_s
            for replica in self.replicas:
                if replica.held.own:
                    if replica.ledger.late_s(now) > patience_s:
                        self._rehome(replica, now)
                    elif not replica.ledger.queued:
                        self._send_held(replica, now)

    # --- a request's life -----------------------------------------------------------------------

    def sent(self, prompt: Prompt, decision: Decision, now: float) -> InFlight:
        """The request goes to ``decision.replica``: its work is booked, its blocks will be there."""
        replica = self.replicas[decision.replica]
        tokens = max(1, int(prompt.units * self.caches.tokens_per_unit(prompt)))
        expected_output = self._expected_output(prompt)
        idle = not replica.ledger.queued
        self._shortlist.became_busy(replica.index)
        booking = replica.book(
            decision.prefill_s, tokens - decision.matched_tokens, int(expected_output), now
        )
        expectation = self.caches.sent(replica.index, prompt, decision.matched_tokens)
        flight = InFlight(
            prompt, decision, replica, booking, now, expectation, settled=idle and not replica.held
        )
        self._sent += 1
        replica.requests += 1
        if not prompt.stream:
            heappush(self._unseen_first_tokens, (replica.ledger.free_at, self._sent, flight))
        arrived = decision.reason is not Reason.RETRY
        if self.journal is not None:
            self.journal.sent(flight, arrived=arrived)
        if arrived:
            self.traffic.arrived(now, decision.prefill_s + decision.saved_s)
            self.saved_s += decision.saved_s
            if decision.reason is Reason.SPILL:
                self.spills += 1
        return flight

    def first_token(self, flight: InFlight, now: float) -> None:
        """The first event with content was seen (streamed requests)."""
        if flight.booking.state == Booking.RELEASED or flight.first_token_at is not None:
            return
        flight.first_token_at = now
        replica = flight.replica
        replica.progress_at = now
        if flight.booking.state == Booking.QUEUED:
            replica.first_token(flight.booking, flight.decision.matched_tokens, now)
            if self.journal is not None:
                self.journal.first_token(flight)
            self._send_held(replica, now)

    @staticmethod
    def progressed(flight: InFlight, now: float) -> None:
        """More of the answer came lately. Need not be told of every event."""
        flight.replica.progress_at = now

    def finished(self, flight: InFlight, now: float, usage: Usage | None = None) -> None:
        """The last byte was passed on. Learns from ``usage`` and from how long it took."""
        replica = flight.replica
        replica.progress_at = now
        sequences = replica.ledger.decoding
        if flight.over:
            return
        was_queued = replica.over(flight.booking, flight.decision.matched_tokens, now, computed=True)
        reply = None
        if usage is not None and usage.output_tokens is not None:
            reply = self._replied(flight, now, usage.output_tokens, sequences)
        if self.journal is not None:
            self.journal.over(flight, computed=True, reply=reply)
        if was_queued:
            self._send_held(replica, now)
        self._request_succeeded(replica)
        if flight.expectation is not None:
            self.caches.computed(flight.expectation)
        if usage is None:
            return
        text = flight.prompt.chains is None and flight.prompt.tokens is None
        if usage.prompt_tokens is not None and self._learn_ratio and text:
            self.token_ratio.learn(usage.prompt_tokens, flight.prompt.units)
        if usage.cached_tokens is not None and usage.prompt_tokens is not None:
            matched = flight.decision.matched_tokens
            replica.credit.answered(matched, usage.cached_tokens)
            lost = replica.credit.cache_lost(
                matched, usage.prompt_tokens, usage.cached_tokens, settled=flight.settled
            )
            if lost and self.caches.cache_lost(replica.index, flight.prompt) and self.journal is not None:
                self.journal.cache_lost(replica)

    def _replied(self, flight: InFlight, now: float, output_tokens: int, sequences: int) -> Reply:
        """Learn from a whole reply."""
        decoding_s = 0.0
        if flight.first_token_at is not None:
            # Prefills beside it stalled this stream for about their share of the time. Policies divide
            # a step by 1 - utilization, so what is learned must be the step without the stalls.
            decoding_s = (now - flight.first_token_at) * (1.0 - flight.replica.ledger.utilization(now))
        reply = Reply(output_tokens, decoding_s, sequences)
        self.traffic.replied(output_tokens)
        flight.replica.replied(reply)
        return reply

    def _request_succeeded(self, replica: ReplicaState) -> None:
        if replica.health.state is not HealthState.HEALTHY:
            self.replicas.changed()
        replica.health.request_succeeded()

    def failed(self, flight: InFlight, now: float, failure: Failure) -> None:
        """The attempt failed by the replica's fault; what it was believed to store is withdrawn."""
        replica = flight.replica
        if not self._end_early(flight, now):
            return
        before = replica.health.state
        if failure is Failure.CONNECT:
            replica.health.connect_failed(now)
            self.caches.unreachable(replica.index)
        elif failure not in (Failure.BUSY, Failure.SILENT):  # busy is not broken; silence probes have told
            replica.health.request_failed(now)
        self._may_be_ejected(replica, before, now)

    def refused(self, flight: InFlight, now: float) -> None:
        """The replica answered 4xx: the client's fault, the replica is well and stored nothing."""
        if self._end_early(flight, now):
            self._request_succeeded(flight.replica)
            self._send_held(flight.replica, now)

    def cancelled(self, flight: InFlight, now: float) -> None:
        """The client left. Nobody's fault."""
        if self._end_early(flight, now):
            self._send_held(flight.replica, now)

    def _peers_changed(self, replica: ReplicaState, now: float) -> None:
        """Other routers sent to the replica, or what they sent is over."""
        if replica.ledger.queued:
            self._shortlist.became_busy(replica.index)
        self._send_held(replica, now)

    def _may_be_ejected(self, replica: ReplicaState, before: HealthState, now: float) -> None:
        ejected = replica.health.state is HealthState.EJECTED
        if ejected and before is not HealthState.EJECTED and self.journal is not None:
            self.journal.replica_failed(replica)
        self._health_changed(replica, now)

    def _health_changed(self, replica: ReplicaState, now: float) -> None:
        self.replicas.changed()
        if not replica.serving:
            self._rehome(replica, now)
        else:
            self._send_held(replica, now)

    def _end_early(self, flight: InFlight, now: float) -> bool:
        """Release the booking; blocks that were never computed are no longer believed to be there."""
        replica = flight.replica
        if flight.over:
            return False
        was_queued = replica.over(flight.booking, flight.decision.matched_tokens, now, computed=False)
        if self.journal is not None:
            self.journal.over(flight, computed=not was_queued)
        if was_queued:
            if not replica.ledger.queued:
                self._shortlist.became_idle(replica.index)
            self.caches.withdrawn(
                replica.index, flight.prompt, flight.decision.matched_tokens, flight.expectation
            )
        elif flight.expectation is not None:
            self.caches.computed(flight.expectation)
        return True

    # --- what replicas tell, what the operator wants ---------------------------------------------

    def load_reported(self, replica: int, report: LoadReport, now: float) -> None:
        """A replica's own gauges. They bound the index; they never replace the ledger."""
        state = self.replicas[replica]
        state.reported(report)
        new_capacity = report.capacity_tokens is not None and report.capacity_tokens != state.kv_tokens
        if new_capacity:
            state.kv_tokens = report.capacity_tokens
        self.caches.reported(replica, report, new_capacity=new_capacity)

    def blocks_stored(self, replica: int, event: BlocksStored) -> None:
        """The replica's KV event: blocks that can be hit there from now on."""
        self.caches.blocks_stored(replica, event)

    def blocks_removed(self, replica: int, event: BlocksRemoved) -> None:
        """The replica's KV event: blocks that can no longer be hit there."""
        self.caches.blocks_removed(replica, event)

    def cache_cleared(self, replica: int) -> None:
        """The replica's KV event, or its restart was seen: nothing can be hit there."""
        self.caches.cache_cleared(replica)

    def events_missed(self, replica: int) -> None:
        """KV events of the replica were lost and could not be had again."""
        self.caches.events_missed(replica)

    def probe_succeeded(self, replica: int, now: float) -> None:
        """The replica answered its probe."""
        state = self.replicas[replica]
        state.probed = True
        before = state.health.state
        state.health.probe_succeeded(now)
        if state.health.state is not before:
            self.replicas.changed()

    def models_reported(self, replica: int, models: frozenset[str]) -> None:
        """The names of the models the replica serves."""
        if self.replicas[replica].models != models:
            self.replicas[replica].models = models
            self.replicas.changed()

    def probe_failed(
        self, replica: int, now: float, *, refused: bool = False, asked_at: float | None = None
    ) -> None:
        """The replica did not answer its probe; ``refused``: nobody listens there.

        ``asked_at``: it did not answer in time what it was asked then. One that went on with its requests
        meanwhile is busy, not dead, and nothing is held against it.
        """
        state = self.replicas[replica]
        if asked_at is not None and state.progress_at > asked_at:
            return
        before = state.health.state
        if refused:
            state.health.connect_failed(now)
            self.caches.unreachable(replica)
        else:
            state.health.probe_failed(now)
        state.probed = True
        self._may_be_ejected(state, before, now)

    def drained(self, replica: int, now: float, *, on: bool = True) -> None:
        """The operator takes the replica out of new work (``on``) or gives it back."""
        state = self.replicas[replica]
        state.drain_ordered(on, state.drain_version + 1)
        if self.journal is not None:
            self.journal.drained(state)
        self._health_changed(state, now)

    # --- who there is, and by what rule ---------------------------------------------------------

    def replica_added(self, spec: ReplicaSpec) -> ReplicaState:
        """A replica joined the fleet: it gets work once a probe has found it well."""
        replica = self._join(spec, HealthState.UNKNOWN)
        self.caches.replica_added(replica.index, spec.blocks, self.settings.default_capacity_tokens)
        self._shortlist.became_idle(replica.index)
        return replica

    def _join(self, spec: ReplicaSpec, health: HealthState) -> ReplicaState:
        index = self.replicas.next_index
        cost = ReplicaCost(self.speed, spec.prefill, spec.decode)
        replica = ReplicaState(index, spec, Health(self.settings.health, health), cost)
        self.replicas.joined(replica)
        return replica

    def replica_removed(self, replica: int, now: float) -> None:
        """The operator took the replica out of the fleet: no new work, what runs there may finish.

        Then ``forget_departed`` lets go of it.
        """
        state = self.replicas[replica]
        state.leaving = True
        self._health_changed(state, now)

    def forget_departed(self) -> list[ReplicaState]:
        """Forget the removed replicas that have nothing in flight any more, and return them.

        All that was known of them is gone, and their indexes are free. Cost: O(what they held).
        """
        departed = [replica for replica in self.replicas if replica.leaving and not replica.in_flight]
        for replica in departed:
            self.replicas.gone(replica)
            self.caches.replica_gone(replica.index)
            self.speed.leave(replica.cost)
            self._shortlist.became_busy(replica.index)
        return departed

    def replica_respecified(self, replica: int, spec: ReplicaSpec) -> None:
        """The operator changed what is said of the replica; it is the same server with the same blocks."""
        self.replicas[replica].respecified(spec)
        self.replicas.changed()

    def reconfigured(self, policy: Policy, selectable: Mapping[str, Policy], settings: FleetSettings) -> None:
        """Other policies or other settings, for decisions from now on. ``exact`` stays as it is.

        Requests that are held go out as those before them get their first token.
        """
        assert settings.exact == self.settings.exact, "how prompts are read is fixed at the start"
        if settings.slo_ttft_s != self.settings.slo_ttft_s:  # what is hot shows again within that time
            self._hot = self.peers.hot = HotPrefixes(self.caches, self.replicas, window_s=settings.slo_ttft_s)
        self.policy, self.selectable, self.settings = policy, selectable, settings
        self.traffic.slo_changed(settings.slo_ttft_s, settings.slo_tpot_s)
        for replica in self.replicas:
            replica.health.settings = settings.health
            if replica.kv_tokens is None:
                self.caches.capacity_assumed(replica.index, settings.default_capacity_tokens)

    @property
    def ready(self) -> bool:
        """At least one replica has been reached and may take work."""
        return any(replica.usable and replica.probed for replica in self.replicas)
