"""The tries of one request, one replica after the other, until one has an answer for the client.

A replica's error answer is kept while another replica is tried: if none has a better one, the client gets it.
"""

from typing import TYPE_CHECKING, NamedTuple

from router.proxy.attempt import Attempt
from router.proxy.body_framing import FramingError
from router.proxy.booked import Booked
from router.proxy.recent import RecentDecision
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import CONNECT_TIMEOUT, FIRST_BYTE_TIMEOUT, RouterError
from router.proxy.service import Service
from router.routing.decision import Decision, NoReplica
from router.routing.in_flight import InFlight
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


class Tries:
    """Owned by its exchange, which gets the answer or the error."""

    __slots__ = ("_exchange", "_kept", "_service", "_tried", "attempt", "began_at", "row")

    def __init__(
        self,
        service: Service,
        exchange: "Exchange",
        flight: InFlight,
        now: float,
        beside: Booked | None = None,
    ) -> None:
        """``flight``: the first one; ``begin`` sends it. ``beside``: the booking that goes with it."""
        self._service = service
        self._exchange = exchange
        self._tried: tuple[int, ...] = (flight.decision.replica,)
        self._kept: KeptAnswer | None = None
        self.attempt = Attempt(service, exchange, flight, now, beside)
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

    # --- one after the other ---------------------------------------------------------------------

    def failed(self, failure: Failure, error: RouterError, why: str) -> None:
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
        attempt, settings = self.attempt, self._exchange.settings
        waited_s = now - attempt.sent_at
        if attempt.waits_for_answer:
            if attempt.unreachable and self._leave(attempt, now):
                return False
            limit_s = settings.first_byte_s
            if waited_s > limit_s:
                self.failed(Failure.FIRST_BYTE_TIMEOUT, FIRST_BYTE_TIMEOUT.at(limit_s), "time-out")
                return True
            attempt.still_waits(now)
        elif waited_s > settings.connect_s:
            self.failed(Failure.CONNECT, CONNECT_TIMEOUT.at(settings.connect_s), "time-out")
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
        if failure not in RETRYABLE or len(tried) >= exchange.settings.attempts:
            return None
        try:
            head = exchange.head
            decision = service.fleet.decide(
                exchange.prompt, now, tried=tried, session=head.session, policy=head.policy
            )
        except NoReplica:
            return None
        return decision if service.budget.take(failure, len(tried)) else None

    def _begin_again(self, decision: Decision, now: float) -> None:
        service = self._service
        service.counters.retries += 1
        flight = service.fleet.sent(self._exchange.prompt, decision, now)
        self._tried = (*self._tried, decision.replica)
        self.row.retried = True
        self.attempt = Attempt(service, self._exchange, flight, now)
        self.row = self._decided(now)
        self.begin(now)
        service.send_released(now)

    # --- error answers ---------------------------------------------------------------------------

    def refused(
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
            exchange.replica_garbled()
        if not exchange.over and not connection.usable:
            exchange.replica_lost(connection, clean=connection.ended_cleanly, answered=True)

    def drop_kept(self) -> None:
        """There is a better answer, or nobody to have one."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept.attempt.drop()
