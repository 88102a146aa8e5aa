"""Who waits in the router, and when they go: late binding of requests to their replica's queue.

A replica is fed while it has nothing without a first token, or little: a tenth of what the SLO allows.
"""

from collections.abc import Collection
from typing import Final

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.decider import Decider
from router.routing.decision import Decision, NoReplica
from router.routing.dispatch import Dispatch
from router.routing.hold_queue import Held
from router.routing.journal import Journal
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.roster import Roster
from router.routing.shortlist import Shortlist

DEADLINE_SLOS: Final = 5.0
"""A held request goes first once it has waited so many times its allowed time to first token."""
FEED_SLOS: Final = 0.1
"""So much prefill, in allowed times to first token, may be queued in an engine while others are held here: it
keeps an engine busy that computes many at once, or is slow to say that it is done."""
GIVE_UP_SLOS: Final = 10.0
"""A replica that shows nothing for so many allowed times beyond its predictions is waited for no longer."""
PEERS_TURN_S: Final = 0.1
"""While a replica has nothing to prefill, another router's request that goes first is waited for so long."""
PARTED_TURN_S = 0.03
"""The same where several tenants wait: routers see turns a little differently and may wait for each other."""


class Holding:
    """Owned by the fleet, whose events tell it where there may be room. Fills every replica's ``held``."""

    __slots__ = (
        "_caches",
        "_decider",
        "_dispatch",
        "_replicas",
        "_shortlist",
        "count",
        "guards",
        "journal",
        "outbox",
        "slo_ttft_s",
    )

    def __init__(
        self,
        replicas: Roster,
        caches: CacheBeliefs,
        shortlist: Shortlist,
        decider: Decider,
        dispatch: Dispatch,
        slo_ttft_s: float,
        *,
        guards: bool,
    ) -> None:
        self._replicas = replicas
        self._caches = caches
        self._shortlist = shortlist
        self._decider = decider
        self._dispatch = dispatch
        self.slo_ttft_s = slo_ttft_s
        self.guards = guards
        """Requests also wait where sending them would cost the others more hits (``cache_guard.py``)."""
        self.journal: Journal | None = None
        self.count = 0
        """Requests of this router that wait."""
        self.outbox: list[Held] = []
        """Those that were sent, or for which no replica is left, since the caller last emptied this."""

    # --- one request ----------------------------------------------------------------------------

    def may_send(self, replica: ReplicaState, prompt: Prompt, prefill_s: float, now: float) -> bool:
        """A request of ``prefill_s`` need not wait for ``replica``: nobody who does goes before it."""
        first = replica.held.next(now)
        if first is not None:
            if not replica.held.goes_before(first, prompt, prefill_s, now):
                return False
            if not replica.ledger.queued and not (first.own and self.guards):
                return not first.own
        return self._has_room(replica, prefill_s) and not self._guarded(replica, prompt, now)

    def _guarded(self, replica: ReplicaState, prompt: Prompt, now: float) -> bool:
        if not self.guards:
            return False
        prices = self._dispatch.guard_prices(replica, prompt, now)
        return prices.lost_s > prices.wait_s

    def _has_room(self, replica: ReplicaState, prefill_s: float) -> bool:
        """The engine has nothing queued, or little enough with this request."""
        ledger = replica.ledger
        return not ledger.queued or ledger.queued_prefill_s + prefill_s <= max(
            FEED_SLOS * self.slo_ttft_s, replica.cost.step_s(ledger.decoding)
        )

    def hold(
        self,
        prompt: Prompt,
        decision: Decision,
        now: float,
        session: str | None,
        context: object,
        within: Collection[int] | None = None,
        two_steps: bool = False,
        policy: str | None = None,
    ) -> Held:
        """The request waits for ``decision.replica``."""
        replica = self._replicas[decision.replica]
        allowed_s = self.slo_ttft_s + replica.cost.prefill_s(self._caches.prompt_tokens(prompt), 0)
        held = Held(prompt, decision, decision.prefill_s, now + DEADLINE_SLOS * allowed_s, session, context)
        held.within = within
        held.two_steps = two_steps
        held.policy = policy
        self._wait(replica, held, now)
        return held

    def _wait(self, replica: ReplicaState, held: Held, now: float) -> None:
        held.prefill_s = held.decision.prefill_s
        held.new_tokens = self._caches.prompt_tokens(held.prompt) - held.decision.matched_tokens
        held.opens = self._caches.blocks_found(held.prompt, held.decision.matched_tokens)
        if self.journal is not None:
            self.journal.held(held, replica, now)
        replica.held.add(held)
        self.count += 1
        # Its siblings should come here, too.
        held.expectation = self._caches.sent(replica.index, held.prompt, held.decision.matched_tokens)

    def dropped(self, held: Held) -> None:
        """The client left while its request was held: no trace is left."""
        replica = self._replicas[held.decision.replica]
        replica.held.remove(held)
        self.count -= 1
        if self.journal is not None:
            self.journal.hold_ended(held, withdrawn=True)
        self._caches.withdrawn(replica.index, held.prompt, held.decision.matched_tokens, held.expectation)

    def _ended(self, held: Held, *, withdrawn: bool = False) -> None:
        """It goes out now, and is expected anew where it goes; ``withdrawn``: that may be elsewhere."""
        self.count -= 1
        if self.journal is not None:
            self.journal.hold_ended(held, withdrawn=withdrawn)
        expectation = held.expectation
        if expectation is not None:
            held.expectation = None
            self._caches.withdrawn(
                held.decision.replica, held.prompt, held.decision.matched_tokens, expectation
            )

    # --- one replica ----------------------------------------------------------------------------

    def room_made(self, replica: ReplicaState, now: float) -> None:
        """The replica may have room: send whose turn it is."""
        if not replica.ledger.queued:
            self._shortlist.became_idle(replica.index)
        queue = replica.held
        while (held := queue.next(now)) is not None:
            if not self._has_room(replica, held.prefill_s):
                return
            if not held.own:
                if replica.ledger.idle_s(now) < (PARTED_TURN_S if queue.parted else PEERS_TURN_S):
                    return  # its router sends it
                mine = queue.next_own(now)
                if mine is None:
                    return
                held = mine
            if held.deadline > now and self._guarded(replica, held.prompt, now):
                return
            if self._found_less(replica, held):
                queue.remove(held)
                self._ended(held)
                self._wait(replica, held, now)
                continue
            queue.sent(held)
            self._ended(held)
            held.flight = self._dispatch.sent(held.prompt, held.decision, now)
            held.flight.settled = False  # what it was believed to find is from when it was held
            self.outbox.append(held)

    def _found_less(self, replica: ReplicaState, held: Held) -> bool:
        """Less of its prompt is cached now than when it was held, by far: price it anew.

        Who was to compute that is still held and goes later, or its client left; or it is evicted.
        """
        decision, prompt, caches = held.decision, held.prompt, self._caches
        if decision.route is not None or not decision.matched_tokens:
            return False
        found = caches.found(replica.index, prompt)
        for one in replica.held.counted_on(prompt):
            if one is not held:
                found = min(found, caches.tokens(prompt, one.opens))
        tokens = caches.prompt_tokens(prompt)
        prefill_s = replica.cost.prefill_s(tokens - found, found)
        if found >= decision.matched_tokens or prefill_s <= 2.0 * decision.prefill_s:
            return False
        held.decision = decision.found_less(found, prefill_s)
        return True

    def peers_changed(self, replica: ReplicaState, now: float) -> None:
        """Other routers sent to the replica, or what they sent is over."""
        if replica.ledger.queued:
            self._shortlist.became_busy(replica.index)
        self.room_made(replica, now)

    def rehome(self, replica: ReplicaState, now: float) -> None:
        """The replica takes no more work, or shows nothing: whoever waits for it is decided again.

        Those who get another replica may have to wait for that one; those who get this one again are sent.
        """
        waiting = []
        while (held := replica.held.next_own(now)) is not None:
            replica.held.remove(held)
            waiting.append(held)
        for held in waiting:
            self._ended(held, withdrawn=True)
            self.expect_first_tokens(now)
            try:
                held.decision = self._decider.decide(
                    held.prompt, now, (), held.session, held.policy, held.within, held.two_steps
                )
            except NoReplica:
                held.flight = None
                self.outbox.append(held)
                continue
            other = self._replicas[held.decision.replica]
            if other is not replica and not self.may_send(other, held.prompt, held.decision.prefill_s, now):
                self._wait(other, held, now)
                continue
            held.flight = self._dispatch.sent(held.prompt, held.decision, now)
            self.outbox.append(held)

    # --- time passes ----------------------------------------------------------------------------

    def expect_first_tokens(self, now: float) -> None:
        """Requests that are not streamed have made room, where their first token was due by ``now``."""
        while (replica := self._dispatch.expected_first_token(now)) is not None:
            self.room_made(replica, now)

    def tick(self, now: float) -> None:
        """Requests that are not streamed may have made room, silent replicas are given up on."""
        self.expect_first_tokens(now)
        if self.count:
            patience_s = GIVE_UP_SLOS * self.slo_ttft_s
            for replica in self._replicas:
                if replica.held.own:
                    if replica.ledger.late_s(now) > patience_s:
                        self.rehome(replica, now)
                    elif not replica.ledger.queued:
                        self.room_made(replica, now)
