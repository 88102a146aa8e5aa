"""One request between its client and the replicas: decide, send, try again, pass the answer on, end once.

No task and no timer belongs to a request: it lives in the callbacks of the two connections, and the data
plane's sweep looks at its limits. Whatever happens, ``_over`` runs exactly once.
"""

import asyncio
import logging
from typing import TYPE_CHECKING

from router.proxy.answer import Answer
from router.proxy.body_framing import FramingError
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.request_head import RequestHead
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import (
    CONNECT_TIMEOUT,
    FIRST_BYTE_TIMEOUT,
    HOLD_FULL,
    HOLD_TIMEOUT,
    IDLE_TIMEOUT,
    INTERNAL,
    MODEL_NOT_FOUND,
    NO_REPLICA,
    REPLICA_BROKEN,
    REPLICA_CLOSED,
    REPLICA_GARBAGE,
    REPLICA_UNREACHABLE,
    SHUTTING_DOWN,
    TOTAL_TIMEOUT,
    RouterError,
)
from router.proxy.service import Service
from router.routing.decision import Decision, NoReplica
from router.routing.hold import Held
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import UNREADABLE, Prompt, read_prompt
from router.routing.retry import RETRYABLE, Failure

if TYPE_CHECKING:
    from router.proxy.client_connection import ClientConnection

logger = logging.getLogger("warmroute.proxy")

CLIENT_LEFT = 499


class Exchange:
    """One request. Made by its client connection, which calls ``start`` and then waits for ``answered``."""

    __slots__ = (
        "_after_host",
        "_answer",
        "_attempts",
        "_body",
        "_connecting",
        "_connection",
        "_decision",
        "_flight",
        "_head",
        "_held",
        "_moved",
        "_moved_at",
        "_prompt",
        "_replica_name",
        "_sent_at",
        "_service",
        "_session",
        "_settings",
        "_started_at",
        "_tried",
        "_unseen_token",
        "_waiting",
        "client",
        "over",
        "request_id",
    )

    def __init__(
        self,
        service: Service,
        client: "ClientConnection",
        head: RequestHead,
        body: bytes,
        request_id: bytes,
        after_host: bytes,
    ) -> None:
        self._service = service
        self._settings = service.settings
        self.client = client
        self._head = head
        self._body = body
        self.request_id = request_id
        self._after_host = after_host
        self._session = head.session
        self._prompt: Prompt = UNREADABLE
        self._attempts = 0
        self._tried: tuple[int, ...] = ()
        self._flight: InFlight | None = None
        """The current attempt's booking, until it is over."""
        self._decision: Decision | None = None
        self._replica_name = ""
        self._connecting: asyncio.Task[None] | None = None
        self._connection: ReplicaConnection | None = None
        self._held: tuple[ReplicaConnection, ResponseHead, bytes, Decision, str] | None = None
        """A replica's error answer, kept while another replica is tried."""
        self._answer: Answer | None = None
        self._waiting: Held | None = None
        """Set while the request waits in the router for its replica."""
        self._unseen_token = False
        self._moved = False
        """Bytes came since the last sweep."""
        self._moved_at = 0.0
        self._started_at = 0.0
        self._sent_at = 0.0
        self.over = False

    # --- before the first byte -------------------------------------------------------------------

    def start(self) -> None:
        """Choose a replica and send the request there."""
        service = self._service
        counters = service.counters
        now = self._started_at = self._moved_at = service.clock()
        counters.in_flight += 1
        service.budget.earn()
        if self._body[:64].lstrip()[:1] == b"{":
            self._prompt = read_prompt(self._body)
        try:
            if service.fleet.held >= self._settings.hold_max_requests:
                self._refuse(HOLD_FULL)
                return
            outcome = service.fleet.submit(self._prompt, now, session=self._session, context=self)
        except NoReplica as error:
            self._refuse(MODEL_NOT_FOUND if error.why == "unknown_model" else NO_REPLICA)
            return
        counters.decision_s.add(service.clock() - now)
        if isinstance(outcome, InFlight):
            self._begin(outcome, now)
        else:
            self._waiting = outcome
            service.hold_began()

    def hold_ended(self, flight: InFlight | None, now: float) -> None:
        """The request waited in the router until now; without a ``flight`` no replica is left for it."""
        self._waiting = None
        if flight is None:
            self._refuse(NO_REPLICA)
        else:
            self._begin(flight, now)

    def _begin(self, flight: InFlight, now: float) -> None:
        """The fleet has booked the request on a replica: send it there."""
        service, decision = self._service, flight.decision
        replica = flight.replica
        self._flight = flight
        self._decision = decision
        name = self._replica_name = replica.name
        self._attempts += 1
        self._tried = (*self._tried, decision.replica)
        decisions = service.counters.decisions
        label = (name, decision.reason.value)
        decisions[label] = decisions.get(label, 0) + 1
        self._sent_at = now
        pool = service.pool(replica)
        connection = pool.take_idle(now - self._settings.replica_keepalive_s)
        if connection is not None:
            self._send(connection)
        else:
            self._connecting = pool.connect(self, self._settings.connect_s)

    def _send(self, connection: ReplicaConnection) -> None:
        self._connection = connection
        head = self._head
        connection.send(
            self,
            b"%b %b HTTP/1.1\r\nhost: %b\r\n%b"
            % (head.method, head.target, connection.authority, self._after_host),
            self._body,
        )

    def connected(self, connection: ReplicaConnection) -> None:
        """The pool made a connection."""
        self._connecting = None
        if self.over:
            connection.abort()
        else:
            self._sent_at = self._service.clock()
            self._send(connection)

    def connect_failed(self, *, timed_out: bool, why: str) -> None:
        """The pool could make none."""
        self._connecting = None
        if not self.over:
            error = CONNECT_TIMEOUT if timed_out else REPLICA_UNREACHABLE
            self._attempt_failed(Failure.CONNECT, error, why)

    def _attempt_failed(self, failure: Failure, error: RouterError, why: str) -> None:
        """The attempt ended without an answer: try another replica, or tell the client."""
        now = self._service.clock()
        self._end_flight(failure, now)
        self._connection = None
        if self._try_again(failure, now):
            return
        logger.warning(
            "request %s failed on replica %s after %d attempt(s): %s (%s)",
            self.request_id.decode(),
            self._replica_name,
            self._attempts,
            error.code,
            why,
        )
        if self._held is not None:
            self._pass_held()
        else:
            self._refuse(error)

    def _try_again(self, failure: Failure, now: float) -> bool:
        service = self._service
        if failure not in RETRYABLE or self._attempts >= self._settings.attempts:
            return False
        try:
            decision = service.fleet.decide(self._prompt, now, tried=self._tried, session=self._session)
        except NoReplica:
            return False
        if not service.budget.take(failure, self._attempts):
            return False
        service.counters.retries += 1
        self._begin(service.fleet.sent(self._prompt, decision, now), now)
        return True

    def _end_flight(self, failure: Failure, now: float) -> None:
        flight = self._flight
        if flight is not None:
            self._flight = None
            self._service.fleet.failed(flight, now, failure)
            self._service.send_released(now)

    # --- the answer ------------------------------------------------------------------------------

    def answer_began(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int
    ) -> None:
        """The answer's head is here; ``data[start:]`` is the beginning of its body."""
        now = self._service.clock()
        if head.status >= 400 and self._is_refusal(connection, head, data, start, now):
            return
        self._drop_held()
        self._pass(connection, head, data, start, now)

    def _is_refusal(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> bool:
        """Settle the attempt; True if another replica is tried, and this answer held until that is known."""
        status = head.status
        flight = self._flight
        if status == 429 or (status == 503 and head.retry_after):
            failure = Failure.BUSY
        elif status in (500, 502, 503, 504):
            failure = Failure.STATUS_5XX
        else:
            if flight is not None:
                self._flight = None
                self._service.fleet.refused(flight, now)
                self._service.send_released(now)
            return False
        self._end_flight(failure, now)
        held, self._held = self._held, None
        if held is not None:
            held[0].abort()
        decision, name = self._decision, self._replica_name
        assert decision is not None
        self._connection = None
        if self._try_again(failure, now):
            connection.hold()
            self._held = (connection, head, data[start:], decision, name)
            return True
        return False

    def _pass_held(self) -> None:
        """No other replica had an answer: the client gets the one there was."""
        assert self._held is not None
        connection, head, data, decision, name = self._held
        self._held = None
        self._decision, self._replica_name = decision, name
        try:
            self._pass(connection, head, data + connection.let_go(), 0, self._service.clock())
        except FramingError:
            self.replica_garbled()
        if not self.over and not connection.usable:
            self.replica_lost(connection, clean=connection.ended_cleanly, answered=True)

    def _drop_held(self) -> None:
        held = self._held
        if held is not None:
            self._held = None
            held[0].abort()

    def _pass(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> None:
        request, client = self._head, self.client
        self._connection = connection
        self._body = b""
        self._moved_at = now
        self._service.counters.first_byte_s.add(now - self._started_at)
        answer = Answer(head, method=request.method, path=request.path, http10=request.http10)
        self._answer = answer
        self._unseen_token = self._prompt.stream
        extra = b"x-request-id: %b\r\n" % self.request_id
        if self._settings.expose_routing:
            extra += self._routing_lines()
        if answer.needs_close:
            client.keep_alive = False
        out = answer.head_bytes(head, http10=request.http10, keep_alive=client.keep_alive, extra=extra)
        if client.write_paused:
            connection.transport.pause_reading()
        self._pass_on(answer, out, data, start)

    def _routing_lines(self) -> bytes:
        decision = self._decision
        assert decision is not None
        name = self._replica_name.encode("ascii", "replace").translate(None, b"\r\n\0")
        return b"x-warmroute-replica: %b\r\nx-warmroute-reason: %b\r\nx-warmroute-matched-tokens: %d\r\n" % (
            name,
            decision.reason.value.encode(),
            decision.matched_tokens,
        )

    def answer_continued(self, data: bytes) -> None:
        """More of the answer's body. Raises ``FramingError``."""
        self._moved = True
        answer = self._answer
        if answer is not None:
            self._pass_on(answer, b"", data, 0)

    def _pass_on(self, answer: Answer, out: bytes, data: bytes, start: int) -> None:
        try:
            body = answer.take(data, start)
        except Exception:
            if out:
                self.client.transport.write(out)
            raise
        if out or body:
            self.client.transport.write(out + body if out else body)
        if answer.first_token and self._unseen_token:
            self._first_token()
        if answer.done:
            self._complete()
        elif answer.cut_short:
            self._broken(REPLICA_BROKEN, "the stream ended without a mark of its end")

    def _first_token(self) -> None:
        self._unseen_token = False
        service = self._service
        now = service.clock()
        service.counters.ttft_s.add(now - self._started_at)
        if self._flight is not None:
            service.fleet.first_token(self._flight, now)
            service.send_released(now)

    def _complete(self) -> None:
        """The answer's last byte was passed on."""
        service, answer, connection = self._service, self._answer, self._connection
        assert answer is not None
        now = service.clock()
        flight = self._flight
        if flight is not None:
            self._flight = None
            usage = answer.usage()
            service.fleet.finished(flight, now, usage)
            if usage is not None:
                counters = service.counters
                counters.prompt_tokens += usage.prompt_tokens or 0
                counters.cached_tokens += usage.cached_tokens or 0
                counters.output_tokens += usage.output_tokens or 0
        self._connection = None
        if connection is not None:
            if answer.reusable and not service.shutting_down:
                if self.client.write_paused:
                    connection.transport.resume_reading()
                connection.release(now)
            else:
                connection.close()
        self._over(self._replica_name, answer.status)
        service.send_released(now)
        self.client.answered()

    # --- ends ------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client left: the replica is to stop, now."""
        if self.over:
            return
        service = self._service
        service.counters.client_disconnects += 1
        self._cancel(service.clock())
        self._over(self._replica_name, CLIENT_LEFT)

    def _cancel(self, now: float) -> None:
        """Stop the attempt under way, by nobody's fault."""
        flight = self._flight
        if flight is not None:
            self._flight = None
            self._service.fleet.cancelled(flight, now)
            self._service.send_released(now)
        waiting = self._waiting
        if waiting is not None:
            self._waiting = None
            self._service.fleet.dropped(waiting, now)
        self._drop_connection()

    def _drop_connection(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.abort()
        task, self._connecting = self._connecting, None
        if task is not None:
            task.cancel()

    def replica_lost(self, connection: ReplicaConnection, *, clean: bool, answered: bool) -> None:
        """The connection to the replica is gone. ``answered``: some bytes of an answer had come."""
        if self.over or connection is not self._connection:
            return  # a held one: what is missing shows when it is wanted
        answer = self._answer
        if answer is not None:
            self._connection = None
            if clean and answer.until_close:
                self._closed(answer)
            else:
                self._broken(REPLICA_BROKEN, "connection closed" if clean else "connection reset")
        elif connection.reused and not answered:
            # The replica had closed an idle connection when the request came: it never saw it.
            self._connection = None
            assert self._flight is not None
            self._connecting = self._service.pool(self._flight.replica).connect(
                self, self._settings.connect_s
            )
        else:
            self._attempt_failed(Failure.CLOSED, REPLICA_CLOSED, "closed" if clean else "reset")

    def _closed(self, answer: Answer) -> None:
        out = answer.closed()
        if answer.done:
            if out:
                self.client.transport.write(out)
            self._complete()
        else:
            self._broken(REPLICA_BROKEN, "the stream ended without a mark of its end")

    def replica_garbled(self) -> None:
        """What the replica sent is not HTTP."""
        if self.over:
            return
        if self._answer is not None:
            self._broken(REPLICA_BROKEN, "bad framing")
        else:
            self._drop_connection()
            self._attempt_failed(Failure.GARBAGE, REPLICA_GARBAGE, "not HTTP")

    def _broken(self, error: RouterError, why: str, *, fault: bool = True) -> None:
        """The answer cannot be completed: the client must not take it for whole."""
        service, answer = self._service, self._answer
        assert answer is not None
        now = service.clock()
        if fault:
            self._end_flight(Failure.BROKEN, now)
        self._cancel(now)
        service.counters.broken_streams += 1
        self._service.count_error(error)
        logger.warning(
            "answer to %s broke off on replica %s: %s (%s)",
            self.request_id.decode(),
            self._replica_name,
            error.code,
            why,
        )
        last = answer.broken_off(error, self.request_id.decode(), self._detail())
        client = self.client
        self._over(self._replica_name, answer.status)
        client.broken_off(last, reset=answer.needs_close)

    def _refuse(self, error: RouterError) -> None:
        """The client gets the router's own error."""
        self._service.count_error(error)
        client = self.client
        self._over(self._replica_name, error.status)
        client.refused(
            error, self.request_id.decode(), head_only=self._head.method == b"HEAD", detail=self._detail()
        )

    def fail(self, error: RouterError) -> None:
        """End the request by the router's own will or fault: shutdown, an internal error."""
        if self.over:
            return
        if self._answer is not None:
            self._broken(error, "ended by the router", fault=False)
        else:
            self._cancel(self._service.clock())
            self._refuse(error)

    def failed_inside(self) -> None:
        """A fault of the router's own was raised while it worked on this request."""
        self.fail(INTERNAL)

    def shut_down(self) -> None:
        """The router stops and waits no longer."""
        self.fail(SHUTTING_DOWN)

    def _detail(self) -> str:
        return (
            f"replica {self._replica_name}"
            if self._settings.expose_replica_urls and self._replica_name
            else ""
        )

    def _over(self, replica: str, status: int) -> None:
        """The request is over: exactly once, after its flight has ended."""
        assert not self.over and self._flight is None
        self.over = True
        service = self._service
        service.counters.in_flight -= 1
        service.count_request(replica, status)
        self._drop_held()
        self.client.exchange = None

    # --- limits, and a slow client ---------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Look at this request's limits."""
        settings = self._settings
        if self._waiting is not None:
            if now - self._started_at > settings.hold_max_wait_s:
                self.fail(HOLD_TIMEOUT)
                return
        elif self._answer is None:
            if self._connection is not None and now - self._sent_at > settings.first_byte_s:
                self._drop_connection()
                self._attempt_failed(Failure.FIRST_BYTE_TIMEOUT, FIRST_BYTE_TIMEOUT, "time-out")
                return
        elif self._moved or self.client.write_paused:
            self._moved = False
            self._moved_at = now
        elif now - self._moved_at > settings.idle_s:
            self._broken(IDLE_TIMEOUT, "time-out")
            return
        if settings.total_s is not None and now - self._started_at > settings.total_s:
            self.fail(TOTAL_TIMEOUT)

    def client_paused(self) -> None:
        """The client does not take what is sent: neither do we take more."""
        if self._answer is not None and self._connection is not None and self._connection.usable:
            self._connection.transport.pause_reading()

    def client_resumed(self) -> None:
        """The client takes bytes again."""
        if self._answer is not None and self._connection is not None and self._connection.usable:
            self._connection.transport.resume_reading()
