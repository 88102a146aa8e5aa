"""The fleet: every replica's state, and the past-tense events that change it.

The proxy and the simulator raise the same events: ``sent``, ``first_token``, ``finished``, ``failed``,
``cancelled``, ``load_reported``, ``blocks_stored`` and the other KV events, the probes' and the operator's,
``replica_added`` and ``replica_removed`` among these. Each part that an event concerns has a file of its own
(the imports below are the list); here is who hears of what, in which order.
Between reading and changing there is no ``await``, so nothing here needs a lock. Time comes in as ``now``
(seconds, any monotonic clock).
"""

import random
from collections.abc import Collection, Iterable, Mapping

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.contract.load_report import LoadReport
from router.routing.availability import Availability
from router.routing.cache_beliefs import CacheBeliefs
from router.routing.cache_guard import GuardPrices
from router.routing.decider import Decider
from router.routing.decision import Assessment, Decision
from router.routing.dispatch import Dispatch
from router.routing.fleet_settings import FleetSettings
from router.routing.fleet_speed import FleetSpeed
from router.routing.health import HealthState
from router.routing.hold_queue import Held
from router.routing.holding import Holding
from router.routing.hot_prefixes import HotPrefixes
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import Journal
from router.routing.membership import Membership
from router.routing.peers import Peers
from router.routing.prompt_blocks import TEXT_LAYOUT, BlockLayout, Prompt, TextLayout
from router.routing.replica_state import ReplicaSpec, ReplicaState
from router.routing.retry import Failure
from router.routing.roster import Roster
from router.routing.shortlist import Shortlist
from router.routing.silence import Silence
from router.routing.tenant_book import TenantBook
from router.routing.traffic import Traffic
from router.routing.usage_lessons import UsageLessons
from router.routing.view import Policy, RoutingRequest


class Fleet:
    """Replicas, what they hold, what they have to do, and the policy that chooses among them."""

    def __init__(
        self,
        replicas: Iterable[ReplicaSpec],
        policy: Policy,
        settings: FleetSettings,
        *,
        selectable: Mapping[str, Policy] | None = None,
        rng: random.Random | None = None,
        layout: BlockLayout = TEXT_LAYOUT,
        tokens_per_unit: float = 0.25,
        use_index: bool = True,
        initial_health: HealthState = HealthState.HEALTHY,
    ) -> None:
        """``selectable``: other policies, by kind, that a request may ask for.

        ``initial_health``: of ``replicas``; ``UNKNOWN`` where probes will tell.
        """
        specs = tuple(replicas)
        self.settings = settings
        self.speed = FleetSpeed()
        self.replicas = Roster()
        self.tenants = TenantBook()
        self.traffic = Traffic(settings.slo_ttft_s, settings.slo_tpot_s, settings.expected_output_tokens)
        self.caches = CacheBeliefs(
            [spec.blocks for spec in specs],
            layout=layout,
            tokens_per_unit=tokens_per_unit,
            capacity_tokens=settings.default_capacity_tokens,
            use_index=use_index,
            exact=settings.exact,
        )
        self.index, self.token_ratio = self.caches.text, self.caches.token_ratio
        roster, caches, traffic = self.replicas, self.caches, self.traffic
        shortlist = Shortlist(roster, rng or random.Random(0))
        hot = HotPrefixes(caches, roster, window_s=settings.slo_ttft_s)
        self._decider = Decider(policy, selectable or {}, roster, caches, traffic, shortlist, hot)
        lessons = UsageLessons(caches, traffic, learn_ratio=isinstance(layout, TextLayout))
        self._dispatch = Dispatch(roster, caches, traffic, shortlist, lessons)
        self._holding = Holding(
            roster,
            caches,
            shortlist,
            self._decider,
            self._dispatch,
            settings.slo_ttft_s,
            guards=settings.guard_caches,
        )
        self._availability = Availability(roster, caches, self._holding, Silence(roster, self.speed, traffic))
        self._membership = Membership(roster, caches, self.speed, shortlist, self._availability, settings)
        for spec in specs:
            self._membership.founded(spec, initial_health)
        self.outbox = self._holding.outbox
        """Held requests that were sent since the caller last looked; it empties this."""
        self.peers = Peers(
            roster,
            caches,
            traffic,
            hot,
            self.tenants,
            queue_changed=self._holding.peers_changed,
            drained=self._availability.changed,
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
        within: Collection[int] | None = None,
    ) -> Decision:
        """Where ``prompt`` goes in one step, by the ``selectable`` policy it asks for if it is one.

        ``within``: only these replicas may have it. Changes nothing but what is counted of arrivals; raises
        ``NoReplica``.
        """
        self._holding.expect_first_tokens(now)
        return self._decider.decide(prompt, now, tried, session, policy, within)

    def others(
        self,
        prompt: Prompt,
        now: float,
        *,
        chosen: int,
        count: int,
        session: str | None = None,
        policy: str | None = None,
        within: Collection[int] | None = None,
    ) -> list[int]:
        """Up to ``count`` more replicas for ``prompt``, best first, should ``chosen`` not answer.

        Changes nothing: whoever sends it there says so (``decide`` among them, then ``sent``).
        """
        return self._decider.others(prompt, now, chosen, count, session, policy, within)

    def decide_prefill(
        self,
        prompt: Prompt,
        now: float,
        *,
        tried: Collection[int],
        policy: str | None = None,
        within: Collection[int] | None = None,
    ) -> Decision:
        """Another prefill replica for a request in two steps whose first failed. Raises ``NoReplica``."""
        self._holding.expect_first_tokens(now)
        return self._decider.prefill(prompt, now, tried, policy, within)

    def decide_answerer(
        self,
        prompt: Prompt,
        now: float,
        source: ReplicaState,
        *,
        tried: Collection[int] = (),
        session: str | None = None,
        policy: str | None = None,
        within: Collection[int] | None = None,
    ) -> Decision:
        """The second step: who pulls from ``source``, which has computed ``prompt``, and answers.

        Raises ``NoReplica``.
        """
        self._holding.expect_first_tokens(now)
        return self._decider.answerer(prompt, now, source, tried, session, policy, within)

    def explain(
        self,
        prompt: Prompt,
        now: float,
        *,
        session: str | None = None,
        policy: str | None = None,
        within: Collection[int] | None = None,
        two_steps: bool = False,
    ) -> tuple[Decision, list[Assessment], RoutingRequest]:
        """The decision, what every candidate would cost alone, and the figures behind the prices.

        Raises ``NoReplica``.
        """
        self._holding.expect_first_tokens(now)
        return self._decider.explain(prompt, now, session, policy, within, two_steps=two_steps)

    def submit(
        self,
        prompt: Prompt,
        now: float,
        *,
        session: str | None = None,
        policy: str | None = None,
        context: object = None,
        within: Collection[int] | None = None,
        two_steps: bool = False,
    ) -> InFlight | Held:
        """Decide and send, or hold; what another policy chose is held with ``hold_asked`` alone.

        Raises ``NoReplica``.

        ``within``: only these replicas may have it. ``two_steps``: a prefill replica may compute the prompt
        and another answer; then what comes back is the first step (``decision.route``).

        A ``Held`` appears in ``outbox`` when its turn comes: sent, with its ``flight`` set, or with none when
        no replica is left. Whoever raises events looks there afterwards.
        """
        holding, decider = self._holding, self._decider
        holding.expect_first_tokens(now)
        decision = decider.decide(prompt, now, (), session, policy, within, two_steps)
        if self.settings.hold and (self.settings.hold_asked or decider.rule(policy) is decider.policy):
            replica = self.replicas[decision.replica]
            if not holding.may_send(replica, prompt, decision.prefill_s, now):
                return holding.hold(prompt, decision, now, session, context, within, two_steps, policy)
        return self._dispatch.sent(prompt, decision, now)

    def dropped(self, held: Held, now: float) -> None:
        """The client left while its request was held: no trace is left."""
        self._holding.dropped(held)

    def tick(self, now: float) -> None:
        """Time passed: requests that are not streamed may have made room, silent replicas are given up on.

        Call it often while ``held`` is not zero.
        """
        self._holding.tick(now)

    # --- a request's life -----------------------------------------------------------------------

    def sent(self, prompt: Prompt, decision: Decision, now: float) -> InFlight:
        """The request goes to ``decision.replica``: its work is booked, its blocks will be there."""
        return self._dispatch.sent(prompt, decision, now)

    def prefilled_elsewhere(self, flight: InFlight, now: float) -> None:
        """What was just sent waits on its replica until another has computed the prompt."""
        self._dispatch.prefilled_elsewhere(flight)
        self._holding.room_made(flight.replica, now)

    def first_token(self, flight: InFlight, now: float) -> None:
        """The first event with content was seen (streamed requests)."""
        if self._dispatch.first_token(flight, now):
            self._holding.room_made(flight.replica, now)

    @staticmethod
    def progressed(flight: InFlight, now: float) -> None:
        """More of the answer came lately. Need not be told of every event."""
        flight.replica.progress_at = now

    def still_waits(self, flight: InFlight, now: float) -> bool:
        """``flight`` was sent a while ago and has no byte of content. True if its replica is now ejected:

        it produces nothing for anybody (``silence.py``). Tell it every second or so.
        """
        return self._availability.still_waits(flight, now)

    def finished(self, flight: InFlight, now: float, usage: Usage | None = None) -> None:
        """The last byte was passed on. Learns from ``usage`` and from how long it took."""
        replica = flight.replica
        replica.progress_at = now
        if flight.over:
            return
        if self._dispatch.finished(flight, now, usage) or replica.held:
            self._holding.room_made(replica, now)
        self._availability.request_succeeded(replica)

    def failed(self, flight: InFlight, now: float, failure: Failure, rest_s: float = 0.0) -> None:
        """The attempt failed by the replica's fault; what it was believed to store is withdrawn.

        ``rest_s``: a busy replica wants no requests for so long; it gets none if another can take them.
        """
        if self._dispatch.ended_early(flight, now):
            self._availability.request_failed(flight.replica, now, failure, rest_s)

    def rested(self, now: float) -> None:
        """Busy replicas whose time is over get requests again. Tell it every second or so."""
        self._availability.rested(now)

    def refused(self, flight: InFlight, now: float) -> None:
        """The replica answered 4xx: the client's fault, the replica is well and stored nothing."""
        if self._dispatch.ended_early(flight, now):
            self._availability.request_succeeded(flight.replica)
            self._holding.room_made(flight.replica, now)

    def cancelled(self, flight: InFlight, now: float) -> None:
        """The client left. Nobody's fault."""
        if self._dispatch.ended_early(flight, now):
            self._holding.room_made(flight.replica, now)

    # --- what replicas tell ---------------------------------------------------------------------

    def load_reported(self, replica: int, report: LoadReport, now: float) -> None:
        """A replica's own gauges. They bound the index; they never replace the ledger."""
        state = self.replicas[replica]
        state.reported(report)
        new_capacity = report.capacity_tokens is not None and report.capacity_tokens != state.kv_tokens
        if new_capacity:
            state.kv_tokens = report.capacity_tokens
            state.hardware_told()
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
        """KV events of the replica were lost and could not be had again: what they told is guessed."""
        self.caches.events_missed(replica)

    def probe_succeeded(self, replica: int, now: float) -> None:
        """The replica answered its probe."""
        self._availability.probe_succeeded(self.replicas[replica], now)

    def probe_failed(
        self, replica: int, now: float, *, refused: bool = False, asked_at: float | None = None
    ) -> None:
        """The replica did not answer its probe; ``refused``: nobody listens there.

        ``asked_at``: it did not answer in time what it was asked then. One that went on with its requests
        meanwhile is busy, not dead, and nothing is held against it.
        """
        self._availability.probe_failed(self.replicas[replica], now, refused=refused, asked_at=asked_at)

    def models_reported(self, replica: int, models: frozenset[str]) -> None:
        """The names of the models the replica serves."""
        self._availability.models_reported(self.replicas[replica], models)

    def engine_found(self, replica: int, engine: str) -> None:
        """Which kind of server the replica was found to be; ``UNNAMED``: none that is known."""
        self._availability.engine_found(self.replicas[replica], engine)

    # --- what the operator wants ----------------------------------------------------------------

    def drained(self, replica: int, now: float, *, on: bool = True) -> None:
        """The operator takes the replica out of new work (``on``) or gives it back."""
        self._availability.drained(self.replicas[replica], now, on=on)

    def replica_added(self, spec: ReplicaSpec) -> ReplicaState:
        """A replica joined the fleet: it gets work once a probe has found it well."""
        return self._membership.added(spec)

    def replica_removed(self, replica: int, now: float) -> None:
        """The operator took the replica out of the fleet: no new work, what runs there may finish.

        Then ``forget_departed`` lets go of it.
        """
        self._membership.removed(self.replicas[replica], now)

    def forget_departed(self) -> list[ReplicaState]:
        """Forget the removed replicas that have nothing in flight any more, and return them.

        All that was known of them is gone, and their indexes are free. Cost: O(what they held).
        """
        return self._membership.forget_departed()

    def replica_respecified(self, replica: int, spec: ReplicaSpec) -> None:
        """The operator changed what is said of the replica; it is the same server with the same blocks."""
        self._membership.respecified(self.replicas[replica], spec)

    def reconfigured(self, policy: Policy, selectable: Mapping[str, Policy], settings: FleetSettings) -> None:
        """Other policies or other settings, for decisions from now on. ``exact`` stays as it is.

        Requests that are held go out as those before them get their first token.
        """
        assert settings.exact == self.settings.exact, "how prompts are read is fixed at the start"
        decider = self._decider
        if settings.slo_ttft_s != self.settings.slo_ttft_s:  # what is hot shows again within that time
            decider.hot = self.peers.hot = HotPrefixes(
                self.caches, self.replicas, window_s=settings.slo_ttft_s
            )
        decider.policy, decider.selectable = policy, selectable
        self.settings = self._membership.settings = settings
        self._holding.slo_ttft_s = settings.slo_ttft_s
        self._holding.guards = settings.guard_caches
        self.traffic.slo_changed(settings.slo_ttft_s, settings.slo_tpot_s)
        for replica in self.replicas:
            replica.health.settings = settings.health
            if replica.kv_tokens is None:
                self.caches.capacity_assumed(replica.index, settings.default_capacity_tokens)

    def guard_prices(self, replica: ReplicaState, prompt: Prompt, now: float) -> GuardPrices | None:
        """By which ``prompt`` is held for ``replica``, or not; ``None`` where caches are not guarded."""
        if not self._holding.guards:
            return None
        return self._dispatch.guard_prices(replica, prompt, now)

    # --- what there is to see -------------------------------------------------------------------

    @property
    def policy(self) -> Policy:
        """By which requests are decided that ask for no other."""
        return self._decider.policy

    @property
    def selectable(self) -> Mapping[str, Policy]:
        """Others, by kind, that a request may ask for."""
        return self._decider.selectable

    @property
    def moves_kv(self) -> bool:
        """Some replicas have a role, or can pull KV."""
        return self.replicas.moves_kv

    @property
    def ready(self) -> bool:
        """At least one replica has been reached and may take work."""
        return any(replica.usable and replica.probed for replica in self.replicas)

    @property
    def held(self) -> int:
        """Requests that wait in the router."""
        return self._holding.count

    @property
    def spills(self) -> int:
        """Requests that left a warmer replica because waiting there cost more."""
        return self._dispatch.spills

    @property
    def saved_s(self) -> float:
        """Prefill seconds that hits were predicted to save."""
        return self._dispatch.saved_s

    @property
    def journal(self) -> Journal | None:
        """Where other routers are told what happens here."""
        return self._dispatch.journal

    @journal.setter
    def journal(self, journal: Journal | None) -> None:
        self._decider.journal = self._dispatch.journal = journal
        self._holding.journal = self._availability.journal = journal
