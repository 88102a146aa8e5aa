"""Requests on replicas, from dispatch to last byte: what each books, and what it is taken to leave there."""

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.cache_guard import GuardPrices
from router.routing.decision import Decision, Reason
from router.routing.first_tokens_due import FirstTokensDue
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import Journal
from router.routing.kv_route import Step
from router.routing.ledger import Booking
from router.routing.peer_events import Reply
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.roster import Roster
from router.routing.shortlist import Shortlist
from router.routing.traffic import Traffic
from router.routing.usage_lessons import UsageLessons


class Dispatch:
    """Owned by the fleet. Its events say whether a replica has room for those who wait; it sends nobody."""

    __slots__ = (
        "_caches",
        "_lessons",
        "_replicas",
        "_shortlist",
        "_traffic",
        "_unseen_first_tokens",
        "journal",
        "saved_s",
        "spills",
    )

    def __init__(
        self,
        replicas: Roster,
        caches: CacheBeliefs,
        traffic: Traffic,
        shortlist: Shortlist,
        lessons: UsageLessons,
    ) -> None:
        self._replicas = replicas
        self._caches = caches
        self._traffic = traffic
        self._shortlist = shortlist
        self._lessons = lessons
        self.journal: Journal | None = None
        self._unseen_first_tokens = FirstTokensDue()
        self.spills = 0
        self.saved_s = 0.0

    def sent(self, prompt: Prompt, decision: Decision, now: float) -> InFlight:
        """The request goes to ``decision.replica``: its work is booked, its blocks will be there."""
        replica = self._replicas[decision.replica]
        new_tokens = self._caches.prompt_tokens(prompt) - decision.matched_tokens
        route = decision.route
        if route is not None and route.step is Step.PREFILL:
            expected_output = 1
        else:
            expected_output = int(self._traffic.expected_output_tokens(prompt.max_tokens))
        if route is not None and route.step is Step.PULL:
            new_tokens = max(1, new_tokens - route.moved_tokens)
        idle = not replica.ledger.queued
        self._shortlist.became_busy(replica.index)
        booking = replica.book(decision.prefill_s, new_tokens, expected_output, now)
        expectation = self._caches.sent(replica.index, prompt, decision.matched_tokens)
        flight = InFlight(
            prompt, decision, replica, booking, now, expectation, settled=idle and not replica.held
        )
        replica.guard.sent(decision.saved_s, new_tokens + expected_output, now)
        replica.requests += 1
        if not prompt.stream:
            self._unseen_first_tokens.push(flight, replica.ledger.free_at)
        arrived = decision.reason is not Reason.RETRY and decision.reason is not Reason.HANDOFF
        if self.journal is not None:
            self.journal.sent(flight, arrived=arrived)
        if arrived:
            self._traffic.arrived(now, decision.prefill_s + decision.saved_s)
            self.saved_s += decision.saved_s
            if decision.reason is Reason.SPILL:
                self.spills += 1
        return flight

    def guard_prices(self, replica: ReplicaState, prompt: Prompt, now: float) -> GuardPrices:
        """What sending ``prompt`` to ``replica`` now costs the others in hits, and what waiting costs."""
        output = self._traffic.expected_output_tokens(prompt.max_tokens)
        return replica.guard.prices(
            self._caches.prompt_tokens(prompt) + int(output),
            replica.kv_tokens,
            replica.ledger.in_flight,
            held=len(replica.held),
            decode_s=output * replica.cost.step_s(replica.ledger.decoding),
            now=now,
        )

    def first_token(self, flight: InFlight, now: float) -> bool:
        """The first event with content was seen. True if its replica may have room now."""
        if flight.booking.state == Booking.RELEASED or flight.first_token_at is not None:
            return False
        flight.first_token_at = now
        replica = flight.replica
        replica.progress_at = now
        if flight.booking.state != Booking.QUEUED:
            return False
        replica.first_token(flight.booking, flight.decision.matched_tokens, now, seen=flight.timed)
        if flight.pulled and flight.settled:
            self._transferred(flight, now)
        if self.journal is not None:
            self.journal.first_token(flight)
        return True

    def prefilled_elsewhere(self, flight: InFlight) -> None:
        """Its replica waits for another's prefill: no work before its first token, a stream all the same."""
        if flight.booking.state == Booking.QUEUED:
            replica = flight.replica
            replica.first_token(flight.booking, flight.decision.matched_tokens, flight.sent_at, seen=False)
            if self.journal is not None:
                self.journal.first_token(flight, seen=False)

    def _transferred(self, flight: InFlight, now: float) -> None:
        """It had the replica to itself: what computing does not explain, the transfer took."""
        route, replica = flight.decision.route, flight.replica
        assert route is not None
        left = max(1, self._caches.prompt_tokens(flight.prompt) - route.tokens)
        transfer_s = now - flight.sent_at - replica.cost.prefill_s(left, route.tokens)
        replica.transfer.observe(route.moved_tokens, max(0.0, transfer_s), now)

    def expected_first_token(self, now: float) -> ReplicaState | None:
        """A request that shows no first token (not streamed) is taken to have it when predicted.

        The replica where one was due by ``now`` and which may have room; ask again until there is none.
        """
        while (flight := self._unseen_first_tokens.pop(now)) is not None:
            if flight.booking.state == Booking.QUEUED:
                flight.replica.first_token(
                    flight.booking, flight.decision.matched_tokens, flight.due_at, seen=False
                )
                if self.journal is not None:
                    self.journal.first_token(flight, seen=False)
                return flight.replica
        return None

    def finished(self, flight: InFlight, now: float, usage: Usage | None) -> bool:
        """The last byte was passed on; what it teaches is learned. True if its replica may have room now."""
        replica, lessons = flight.replica, self._lessons
        sequences = replica.ledger.decoding
        timed = flight.timed
        count = usage.prompt_count if timed and usage is not None else None
        was_queued = replica.over(
            flight.booking, flight.decision.matched_tokens, now, learn=True, computed=timed, count=count
        )
        reply = None
        route = flight.decision.route
        whole = route is None or route.step is not Step.PREFILL
        if whole and usage is not None and usage.output_tokens is not None:
            decoding_s = lessons.replied(flight, now, usage.output_tokens, sequences)
            if self.journal is not None:
                reply = Reply(usage.output_tokens, decoding_s, sequences)
        if self.journal is not None:
            self.journal.over(flight, computed=True, reply=reply, count=count)
        if flight.expectation is not None:
            self._caches.computed(flight.expectation)
        if usage is not None and lessons.prompt_counted(flight, usage) and self.journal is not None:
            self.journal.cache_lost(replica)
        return was_queued

    def ended_early(self, flight: InFlight, now: float) -> bool:
        """It failed, was refused, or its client left: blocks never computed are not believed to be there.

        False if it was over before.
        """
        replica = flight.replica
        if flight.over:
            return False
        was_queued = replica.over(flight.booking, flight.decision.matched_tokens, now, learn=False)
        if self.journal is not None:
            self.journal.over(flight, computed=not was_queued)
        if was_queued:
            if not replica.ledger.queued:
                self._shortlist.became_idle(replica.index)
            self._caches.withdrawn(
                replica.index, flight.prompt, flight.decision.matched_tokens, flight.expectation
            )
        elif flight.expectation is not None:
            self._caches.computed(flight.expectation)
        return True
