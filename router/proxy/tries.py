"""The tries of one request, one replica after the other, until one has an answer for the client.

A replica's error answer is kept while another replica is tried: if none has a better one, the client gets it.
"""

from typing import TYPE_CHECKING, NamedTuple

from router.proxy.asker import Asker
from router.proxy.attempt import Attempt
from router.proxy.body_framing import FramingError
from router.proxy.booked import Booked
from router.proxy.prefill_request import with_transfer_params
from router.proxy.recent import RecentDecision
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.replica_pool import ReplicaPool
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import (
    CONNECT_TIMEOUT,
    FIRST_BYTE_TIMEOUT,
    OUT_OF_SOCKETS,
    REPLICA_BROKEN,
    REPLICA_CLOSED,
    REPLICA_GARBAGE,
    REPLICA_UNREACHABLE,
    RouterError,
)
from router.proxy.service import Service
from router.routing.decision import Decision, NoReplica, Reason
from router.routing.in_flight import InFlight
from router.routing.kv_route import Step
from router.routing.retry import RETRYABLE, Failure, failure_of_status, rest_s

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange


class KeptAnswer(NamedTuple):
    """An error answer whose connection is held."""

    attempt: Attempt
    connection: ReplicaConnection
    head: ResponseHead
    body: bytes
    """As much as came with the head."""


class Tries(Asker):
    """Owned by its exchange, which gets the answer or the error. Ends with the exchange."""

    __slots__ = ("_exchange", "_kept", "_kv_params", "_service", "_tried", "attempt", "began_at", "row")

    def __init__(
        self,
        service: Service,
        exchange: "Exchange",
        flight: InFlight,
        now: float,
        beside: Booked | None = None,
        kv_params: bytes = b"",
    ) -> None:
        """``flight``: the first one; ``begin`` sends it. ``beside``: the booking that goes with it.

        ``kv_params``: what a prefill replica said of where the KV lies, for the first one alone.
        """
        super().__init__(exchange.settings)
        self._service = service
        self._kv_params = kv_params
        self._exchange = exchange
        self._tried: tuple[int, ...] = (flight.decision.replica,)
        self._kept: KeptAnswer | None = None
        self.attempt = Attempt(service, self, flight, now, beside)
        """The current one, or the last."""
        self.began_at = now
        """When the first one was booked."""
        self.row: RecentDecision = self._decided(now)
        """What people see of the current one."""

    @property
    def count(self) -> int:
        """Tries so far."""
        return len(self._tried)

    def begin(self, now: float) -> None:
        """Send the request where the fleet has booked it."""
        attempt = self.attempt
        self._service.counters.decided(attempt.name, attempt.decision.reason)
        attempt.send(now)

    def _decided(self, now: float) -> RecentDecision:
        exchange, attempt = self._exchange, self.attempt
        return self._service.recent.decided(
            now, exchange.request_id, attempt.name, attempt.decision, exchange.prompt
        )

    # --- what the replica does -------------------------------------------------------------------

    def request(self, pool: ReplicaPool) -> tuple[bytes, bytes]:
        """See ``Asker``; with where the replica's KV can be had, if it is to pull."""
        exchange, decision = self._exchange, self.attempt.decision
        body, source = exchange.body_for(pool), b""
        if decision.route is not None and decision.route.step is Step.PULL:
            if self._kv_params and decision.reason is Reason.HANDOFF:
                # For one replica, once: the next one tried goes there for another reason.
                body = with_transfer_params(body, self._kv_params)
            else:
                named = self._service.kv_source(decision)
                if named is not None:
                    source = b"%b: %b\r\n" % (named[0].encode(), named[1].encode())
        return exchange.message(pool, body, source)

    def connect_failed(self, why: str, *, own: bool) -> None:
        """The attempt could make no connection. ``own``: because this process had no socket for it."""
        if own:
            self._failed(Failure.NO_SOCKET, OUT_OF_SOCKETS, "no socket left")
        else:
            self._failed(Failure.CONNECT, REPLICA_UNREACHABLE, why)

    def answer_began(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int
    ) -> None:
        """An answer's head is here, and in ``data[start:]`` some of its body. Raises ``FramingError``."""
        now = self._service.clock()
        if head.status >= 400 and self._refused(connection, head, data, start, now):
            return
        self.drop_kept()
        self._exchange.pass_on(connection, head, data, start, now)

    def answer_continued(self, data: bytes) -> None:
        """More of the answer's body. Raises ``FramingError``."""
        relay = self._exchange.relay
        if relay is not None:
            relay.continued(data)

    def replica_lost(self, connection: ReplicaConnection, *, clean: bool, answered: bool) -> None:
        """The connection to the replica is gone. ``answered``: some bytes of an answer had come."""
        relay = self._exchange.relay
        if self._exchange.over or connection is not self.attempt.connection:
            return  # a kept one: what is missing shows when it is wanted
        if relay is not None:
            relay.lost(clean=clean)
        elif connection.reused and not answered:
            self.attempt.send_again()  # it never saw the request
        else:
            self._failed(Failure.CLOSED, REPLICA_CLOSED, "closed" if clean else "reset")

    def replica_garbled(self) -> None:
        """What the replica sent is not HTTP."""
        relay = self._exchange.relay
        if relay is not None:
            relay.broken(REPLICA_BROKEN, "bad framing")
        elif not self._exchange.over:
            self._failed(Failure.GARBAGE, REPLICA_GARBAGE, "not HTTP")

    # --- one after the other ---------------------------------------------------------------------

    def _failed(self, failure: Failure, error: RouterError, why: str) -> None:
        """The attempt ended without an answer: try another replica, or tell the client."""
        attempt, exchange = self.attempt, self._exchange
        now = self._service.clock()
        attempt.drop()
        attempt.failed(now, failure)
        if self._try_again(failure, now):
            return
        self._service.failures.log(
            "request %s failed on replica %s after %d attempt(s): %s (%s)",
            exchange.request_id.decode(),
            attempt.name,
            len(self._tried),
            error.code,
            why,
        )
        if self._kept is not None:
            self._pass_kept(self._kept, now)
        else:
            exchange.refuse(error)

    def overdue(self, now: float) -> bool:
        """Look at the limits of an attempt that has no answer yet. True if one was passed."""
        attempt, settings = self.attempt, self.settings
        waited_s = now - attempt.sent_at
        if attempt.waits_for_answer:
            if attempt.unreachable and self._leave(attempt, now):
                return False
            limit_s = settings.first_byte_s
            if waited_s > limit_s:
                self._failed(Failure.FIRST_BYTE_TIMEOUT, FIRST_BYTE_TIMEOUT.at(limit_s), "time-out")
                return True
            attempt.still_waits(now)
        elif waited_s > settings.connect_s:
            self._failed(Failure.CONNECT, CONNECT_TIMEOUT.at(settings.connect_s), "time-out")
            return True
        return False

    def _leave(self, attempt: Attempt, now: float) -> bool:
        """Try another replica, if there is one, although this one may still answer."""
        decision = self._another(Failure.SILENT, now)
        if decision is None:
            return False
        attempt.drop()
        attempt.failed(now, Failure.SILENT)
        self._begin_again(decision, now)
        return True

    def _try_again(self, failure: Failure, now: float) -> bool:
        decision = self._another(failure, now)
        if decision is None:
            return False
        self._begin_again(decision, now)
        return True

    def _another(self, failure: Failure, now: float) -> Decision | None:
        """Where the request may be tried after ``failure``, if anywhere; the budget is charged for it."""
        service, exchange, tried = self._service, self._exchange, self._tried
        if failure not in RETRYABLE or len(tried) >= self.settings.attempts:
            return None
        try:
            decision = exchange.decide_again(now, tried)
        except NoReplica:
            return None
        return decision if service.budget.take(failure, len(tried)) else None

    def _begin_again(self, decision: Decision, now: float) -> None:
        service = self._service
        service.counters.retries += 1
        flight = service.fleet.sent(self._exchange.prompt, decision, now)
        self._tried = (*self._tried, decision.replica)
        self.row.retried = True
        self.attempt = Attempt(service, self, flight, now)
        self.row = self._decided(now)
        self.begin(now)
        service.send_released(now)

    # --- error answers ---------------------------------------------------------------------------

    def _refused(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> bool:
        """An error answer began: settle the attempt.

        True if another replica is tried, and this answer kept until that is known.
        """
        attempt = self.attempt
        failure = failure_of_status(head.status, retry_after=head.retry_after is not None)
        if failure is None:
            attempt.refused(now)
            return False
        self.drop_kept()
        attempt.failed(now, failure, rest_s(head.retry_after))
        if not self._try_again(failure, now):
            return False
        connection.hold()
        self._kept = KeptAnswer(attempt, connection, head, data[start:])
        return True

    def _pass_kept(self, kept: KeptAnswer, now: float) -> None:
        """No other replica had an answer: the client gets the one there was."""
        exchange, connection = self._exchange, kept.connection
        self._kept = None
        self.attempt = kept.attempt
        try:
            exchange.pass_on(connection, kept.head, kept.body + connection.let_go(), 0, now)
        except FramingError:
            self.replica_garbled()
        if not exchange.over and not connection.usable:
            self.replica_lost(connection, clean=connection.ended_cleanly, answered=True)

    def drop_kept(self) -> None:
        """There is a better answer, or nobody to have one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.attempt.drop()
