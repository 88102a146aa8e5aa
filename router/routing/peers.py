"""What the other routers tell changes this router's beliefs as its own events do.

Their work is in the ledgers, their held requests in the queues, their prompts in the index, and what replicas
were seen to do for them in the calibration: a router that saw only its own requests would take the time a
replica spends on others' for slowness. What a router had outstanding goes with it (``gone``).
"""

from collections.abc import Callable, Iterable

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.exact_index import Expectation
from router.routing.hold_queue import Held
from router.routing.hot_prefixes import HotPrefixes
from router.routing.ledger import Booking
from router.routing.peer_events import (
    CacheLost,
    FirstTokenCame,
    PeerEvent,
    PrefixesAsked,
    PromptCount,
    PromptStored,
    ReplicaDrained,
    ReplicaFailed,
    Reply,
    WorkHeld,
    WorkOver,
    WorkSent,
)
from router.routing.prompt_blocks import Prompt
from router.routing.quota import Quota
from router.routing.replica_state import ReplicaState
from router.routing.roster import Roster
from router.routing.tenant import Tenant
from router.routing.tenant_book import TenantBook
from router.routing.traffic import Traffic


class _Work:
    """A peer's request on a replica."""

    __slots__ = ("booking", "charged", "expectation", "matched_tokens", "prompt", "quota", "replica")

    def __init__(
        self,
        replica: ReplicaState,
        booking: Booking,
        prompt: Prompt,
        matched_tokens: int,
        expectation: Expectation | None,
        quota: Quota | None,
        charged: int,
    ) -> None:
        """``charged``: so many tokens to its tenant's ``quota``, if there are limits."""
        self.replica = replica
        self.booking = booking
        self.prompt = prompt
        self.matched_tokens = matched_tokens
        self.expectation = expectation
        self.quota = quota
        self.charged = charged


class Peers:
    """Owned by the fleet. Events it cannot place (a replica that is not known here) are counted and left."""

    __slots__ = (
        "_by_name",
        "_caches",
        "_drained",
        "_held",
        "_queue_changed",
        "_replicas",
        "_tenants",
        "_touched",
        "_traffic",
        "_work",
        "doubted",
        "hot",
        "unknown",
    )

    def __init__(
        self,
        replicas: Roster,
        caches: CacheBeliefs,
        traffic: Traffic,
        hot: HotPrefixes,
        tenants: TenantBook,
        *,
        queue_changed: Callable[[ReplicaState, float], None],
        drained: Callable[[ReplicaState, float], None],
    ) -> None:
        """``queue_changed``: a replica's queue did, requests held here may go. ``drained``: its mark did."""
        self._replicas = replicas
        self._caches = caches
        self._traffic = traffic
        self.hot = hot
        self._tenants = tenants
        self._queue_changed = queue_changed
        self._drained = drained
        self._by_name: dict[str, ReplicaState] = {}
        self._work: dict[str, dict[int, _Work]] = {}
        self._held: dict[str, dict[int, tuple[ReplicaState, Held, int, Quota | None]]] = {}
        self._touched: dict[int, ReplicaState] = {}
        self.doubted: set[str] = set()
        """Names of replicas that a peer ejected; whoever probes them takes them out."""
        self.unknown = 0
        """Events about replicas that are not known here."""

    # --- from the carrier -----------------------------------------------------------------------

    def told(self, router: str, events: Iterable[PeerEvent], now: float) -> None:
        """``router`` told this, in this order. Room it makes is looked at when all of it is known."""
        for event in events:
            self._apply(router, event, now)
        self._settle(now)

    def stated(self, router: str, outstanding: Iterable[int], now: float) -> None:
        """``router`` told all that it has outstanding: any other request of it is over.

        It tells of these requests once more afterwards, for those who missed some.
        """
        numbers = set(outstanding)
        for number in [number for number in self._held.get(router, ()) if number not in numbers]:
            self._unhold(router, number, computed=True)
        for number in [number for number in self._work.get(router, ()) if number not in numbers]:
            self._over(router, number, now, computed=True, learn=False)  # when it ended is not known
        self._settle(now)

    def gone(self, router: str, now: float) -> None:
        """``router`` is no more, or has not been heard for too long: so is what it had outstanding."""
        self.stated(router, (), now)
        self._work.pop(router, None)
        self._held.pop(router, None)

    def outstanding(self, router: str) -> int:
        """Requests ``router`` holds or has in flight."""
        return len(self._work.get(router, ())) + len(self._held.get(router, ()))

    # --- one event ------------------------------------------------------------------------------

    def _apply(self, router: str, event: PeerEvent, now: float) -> None:
        match event:
            case WorkSent():
                self._sent(router, event, now)
            case FirstTokenCame():
                self._first_token(router, event, now)
            case WorkOver():
                self._unhold(router, event.request, computed=event.computed)
                computed = event.computed
                self._over(
                    router,
                    event.request,
                    now,
                    computed=computed,
                    learn=computed,
                    reply=event.reply,
                    count=event.count,
                )
            case WorkHeld():
                self._hold(router, event, now)
            case PrefixesAsked():
                self.hot.heated(event.keys, event.prefill_s, now)
            case _:
                self._heard_of(event, now)

    def _sent(self, router: str, event: WorkSent, now: float) -> None:
        replica = self._named(event.replica)
        if replica is None or event.request in self._work.get(router, ()):
            return  # told once more
        booking = replica.book(event.prefill_s, event.new_tokens, event.expected_output_tokens, now)
        prompt = self._caches.named(replica.index, event.keys, event.naming, self._tenant(event.tenant))
        expectation = self._caches.sent(replica.index, prompt, event.matched_tokens)
        quota, charged = self._began(event.tenant), 0
        if quota is not None and event.cold_prefill_s is not None:
            charged = event.matched_tokens + event.new_tokens + event.expected_output_tokens
            quota.peer_charged(1, charged, now)
        self._work.setdefault(router, {})[event.request] = _Work(
            replica, booking, prompt, event.matched_tokens, expectation, quota, charged
        )
        if event.cold_prefill_s is not None:
            self._traffic.arrived(now, event.cold_prefill_s)
        self._touched[replica.index] = replica

    def _first_token(self, router: str, event: FirstTokenCame, now: float) -> None:
        work = self._work.get(router, {}).get(event.request)
        if work is None or work.booking.state != Booking.QUEUED:
            return
        if event.seen:
            work.replica.progress_at = now
        work.replica.first_token(work.booking, work.matched_tokens, now, seen=event.seen)
        self._touched[work.replica.index] = work.replica

    def _over(
        self,
        router: str,
        number: int,
        now: float,
        *,
        computed: bool,
        learn: bool,
        reply: Reply | None = None,
        count: PromptCount | None = None,
    ) -> None:
        work = self._work.get(router, {}).pop(number, None)
        if work is None:
            return
        replica = work.replica
        was_queued = replica.over(work.booking, work.matched_tokens, now, learn=learn, count=count)
        if was_queued and not computed:
            self._caches.withdrawn(replica.index, work.prompt, work.matched_tokens, work.expectation)
        elif work.expectation is not None:
            self._caches.computed(work.expectation)
        if work.quota is not None:
            work.quota.peer_ended()
            if not computed:
                work.quota.peer_charged(0, -work.charged, now)
            elif reply is not None and work.charged:
                work.quota.peer_charged(0, reply.output_tokens - work.booking.expected_output_tokens, now)
        if reply is not None:
            replica.progress_at = now
            self._traffic.replied(reply.output_tokens)
            replica.replied(reply.output_tokens, reply.decoding_s, reply.sequences)
        self._touched[replica.index] = replica

    def _hold(self, router: str, event: WorkHeld, now: float) -> None:
        replica = self._named(event.replica)
        if replica is None or event.request in self._held.get(router, ()):
            return  # told once more
        prompt = self._caches.named(replica.index, event.keys, event.naming, self._tenant(event.tenant))
        prompt.priority = event.priority
        held = Held(
            prompt,
            None,
            event.prefill_s,
            now + event.deadline_in_s,
            router=router,
            number=event.request,
            own=False,
            new_tokens=event.new_tokens,
            opens=self._caches.blocks_found(prompt, event.matched_tokens),
        )
        # Its siblings should come here, too.
        held.expectation = self._caches.sent(replica.index, prompt, event.matched_tokens)
        replica.held.add(held)
        self._held.setdefault(router, {})[event.request] = (
            replica,
            held,
            event.matched_tokens,
            self._began(event.tenant),
        )

    def _unhold(self, router: str, number: int, *, computed: bool) -> None:
        entry = self._held.get(router, {}).pop(number, None)
        if entry is None:
            return
        replica, held, matched_tokens, quota = entry
        if quota is not None:
            quota.peer_ended()
        if computed:
            replica.held.sent(held)
        else:
            replica.held.remove(held)
        if replica not in self._replicas:
            return
        if held.expectation is not None or not computed:
            self._caches.withdrawn(replica.index, held.prompt, matched_tokens, held.expectation)
        self._touched[replica.index] = replica

    def _tenant(self, name: str) -> Tenant | None:
        return self._tenants.tenant(name) if name else None

    def _began(self, tenant: str) -> Quota | None:
        """A peer's request of this tenant began; whoever keeps the quota says when it ended."""
        quota = self._tenants.quotas.get(tenant) if tenant else None
        if quota is not None:
            quota.peer_began()
        return quota

    def _heard_of(self, event: PeerEvent, now: float) -> None:
        """News of a replica, not of a request."""
        assert isinstance(event, ReplicaFailed | CacheLost | ReplicaDrained | PromptStored)
        replica = self._named(event.replica)
        if replica is None:
            return
        match event:
            case PromptStored():
                self._caches.stored(replica.index, event.keys, event.naming, self._tenant(event.tenant))
            case CacheLost():
                self._caches.unreachable(replica.index)
            case ReplicaFailed():
                replica.health.doubted()
                self.doubted.add(replica.name)
            case ReplicaDrained():
                if replica.drain_ordered(event.on, event.version):
                    self._drained(replica, now)

    def _settle(self, now: float) -> None:
        touched, self._touched = self._touched, {}
        for replica in touched.values():
            self._queue_changed(replica, now)

    def _named(self, name: str) -> ReplicaState | None:
        replica = self._by_name.get(name)
        if replica is None or replica.leaving or replica not in self._replicas:
            self._by_name = {one.name: one for one in self._replicas.staying}
            replica = self._by_name.get(name)
            if replica is None:
                self.unknown += 1
        return replica
