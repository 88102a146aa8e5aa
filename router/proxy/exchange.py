"""One request between its client and the replicas: decide, send, try again, pass the answer on, end once.

No task and no timer belongs to a request: it lives in the callbacks of the two connections, and the data
plane's sweep looks at its limits. Whatever happens, ``_over`` runs exactly once.
"""

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from router.proxy.answer import Answer
from router.proxy.attempt import Attempt
from router.proxy.body_framing import FramingError
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.replica_pool import ReplicaPool
from router.proxy.request_head import RequestHead
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import (
    CONNECT_TIMEOUT,
    CONTROL_FIELD,
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
from router.routing.control_fields import may_hide_control_field
from router.routing.decision import Decision, NoReplica
from router.routing.hold_queue import Held
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
        "_answer",
        "_attempt",
        "_attempts",
        "_client_keys",
        "_head",
        "_kept",
        "_last_lines",
        "_moved",
        "_moved_at",
        "_prompt",
        "_service",
        "_started_at",
        "_tried",
        "_ttft_s",
        "_unseen_token",
        "_waiting",
        "body",
        "client",
        "over",
        "request_id",
        "settings",
    )

    def __init__(
        self,
        service: Service,
        client: "ClientConnection",
        head: RequestHead,
        body: bytes,
        request_id: bytes,
        client_keys: bytes,
        last_lines: bytes,
    ) -> None:
        """``client_keys`` and ``last_lines`` are header lines of what replicas get (``request_head.py``)."""
        self._service = service
        self.settings = service.settings
        self.client = client
        self._head = head
        self.body = body
        self.request_id = request_id
        self._client_keys = client_keys
        self._last_lines = last_lines
        self._prompt: Prompt = UNREADABLE
        self._attempts = 0
        self._tried: tuple[int, ...] = ()
        self._attempt: Attempt | None = None
        """The current one, or the last."""
        self._kept: tuple[Attempt, ReplicaConnection, ResponseHead, bytes] | None = None
        """A replica's error answer, kept while another replica is tried."""
        self._answer: Answer | None = None
        """What is being passed on."""
        self._waiting: Held | None = None
        """Set while the request waits in the router for its replica."""
        self._unseen_token = False
        self._ttft_s: float | None = None
        self._moved = False
        """Bytes came since the last sweep."""
        self._moved_at = 0.0
        self._started_at = 0.0
        self.over = False

    # --- before the first byte -------------------------------------------------------------------

    def start(self) -> None:
        """Choose a replica and send the request there."""
        service = self._service
        now = self._started_at = service.clock()
        service.counters.in_flight += 1
        service.budget.earn()
        body = self.body
        if body[:1] == b"{" or body[:64].lstrip()[:1] == b"{":
            if service.prompt_reader is not None:
                service.prompt_reader.read(body, self._prompt_read)
                return
            prompt = self._prompt = read_prompt(body)
            self._unseen_token = prompt.stream
        self._choose(now)

    def _prompt_read(self, prompt: Prompt) -> None:
        """The prompt reader is done, at once or after a while."""
        if not self.over:
            self._prompt = prompt
            self._unseen_token = prompt.stream
            self._choose(self._service.clock())

    def _refused_field(self) -> str | None:
        """A field that the request sets and only the operator may; "" if it cannot be read but seems to."""
        prompt = self._prompt
        if prompt.controls:
            allowed = self.settings.client_control_fields
            return next((field for field in prompt.controls if field not in allowed), None)
        if prompt is UNREADABLE and self.body and may_hide_control_field(self.body):
            return ""
        return None

    def _choose(self, now: float) -> None:
        service = self._service
        fleet = service.fleet
        field = self._refused_field()
        if field is not None:
            self._refuse(replace(CONTROL_FIELD, param=field or None))
            return
        if fleet.held >= self.settings.hold_max_requests:
            self._refuse(HOLD_FULL.at(self.settings.hold_max_requests))
            return
        try:
            head = self._head
            outcome = fleet.submit(self._prompt, now, session=head.session, policy=head.policy, context=self)
        except NoReplica as error:
            self._refuse(MODEL_NOT_FOUND if error.why == "unknown_model" else NO_REPLICA)
            return
        service.counters.decision_s.add(service.clock() - self._started_at)
        if isinstance(outcome, InFlight):
            self._begin(outcome, now)
        else:
            self._waiting = outcome
            service.hold_began()
        if fleet.outbox:
            service.send_released(now)

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
        attempt = self._attempt = Attempt(service, self, flight, now)
        self._attempts += 1
        self._tried = (*self._tried, decision.replica)
        decisions = service.counters.decisions
        label = (attempt.name, decision.reason)  # a str, whose value needs no look-up
        decisions[label] = decisions.get(label, 0) + 1
        attempt.send(now)

    def request_head(self, pool: ReplicaPool) -> bytes:
        """The head that the replica of ``pool`` gets: its own key, or the client's if that is passed on."""
        head = self._head
        return b"%b %b HTTP/1.1\r\n%b%b%b" % (
            head.method,
            head.target,
            pool.host_line,
            pool.key_line or self._client_keys,
            self._last_lines,
        )

    def connect_failed(self, why: str) -> None:
        """The attempt could make no connection."""
        self._attempt_failed(Failure.CONNECT, REPLICA_UNREACHABLE, why)

    def _attempt_failed(self, failure: Failure, error: RouterError, why: str) -> None:
        """The attempt ended without an answer: try another replica, or tell the client."""
        attempt = self._attempt
        assert attempt is not None
        now = self._service.clock()
        attempt.drop()
        attempt.failed(now, failure)
        if self._try_again(failure, now):
            return
        self._service.failures.log(
            "request %s failed on replica %s after %d attempt(s): %s (%s)",
            self.request_id.decode(),
            attempt.name,
            self._attempts,
            error.code,
            why,
        )
        if self._kept is not None:
            self._pass_kept()
        else:
            self._refuse(error)

    def _try_again(self, failure: Failure, now: float) -> bool:
        decision = self._another(failure, now)
        if decision is None:
            return False
        self._begin_again(decision, now)
        return True

    def _another(self, failure: Failure, now: float) -> Decision | None:
        """Where the request may be tried after ``failure``, if anywhere; the budget is charged for it."""
        service = self._service
        if failure not in RETRYABLE or self._attempts >= self.settings.attempts:
            return None
        try:
            head = self._head
            decision = service.fleet.decide(
                self._prompt, now, tried=self._tried, session=head.session, policy=head.policy
            )
        except NoReplica:
            return None
        return decision if service.budget.take(failure, self._attempts) else None

    def _begin_again(self, decision: Decision, now: float) -> None:
        service = self._service
        service.counters.retries += 1
        self._begin(service.fleet.sent(self._prompt, decision, now), now)
        service.send_released(now)

    def _leave(self, attempt: Attempt, now: float) -> bool:
        """Try another replica, if there is one, although this one may still answer."""
        decision = self._another(Failure.SILENT, now)
        if decision is None:
            return False
        attempt.drop()
        attempt.failed(now, Failure.SILENT)
        self._begin_again(decision, now)
        return True

    # --- the answer ------------------------------------------------------------------------------

    def answer_began(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int
    ) -> None:
        """The answer's head is here; ``data[start:]`` is the beginning of its body."""
        now = self._service.clock()
        if head.status >= 400 and self._is_refusal(connection, head, data, start, now):
            return
        if self._kept is not None:
            self._drop_kept()
        self._pass(connection, head, data, start, now)

    def _is_refusal(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> bool:
        """Settle the attempt; True if another replica is tried, and this answer kept until that is known."""
        attempt = self._attempt
        assert attempt is not None
        failure = _failure_of(head)
        if failure is None:
            attempt.refused(now)
            return False
        self._drop_kept()
        attempt.failed(now, failure)
        if not self._try_again(failure, now):
            return False
        connection.hold()
        self._kept = (attempt, connection, head, data[start:])
        return True

    def _pass_kept(self) -> None:
        """No other replica had an answer: the client gets the one there was."""
        assert self._kept is not None
        self._attempt, connection, head, data = self._kept
        self._kept = None
        try:
            self._pass(connection, head, data + connection.let_go(), 0, self._service.clock())
        except FramingError:
            self.replica_garbled()
        if not self.over and not connection.usable:
            self.replica_lost(connection, clean=connection.ended_cleanly, answered=True)

    def _drop_kept(self) -> None:
        kept = self._kept
        if kept is not None:
            self._kept = None
            kept[0].drop()

    def _pass(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> None:
        """Pass the head on, and what there is of the body."""
        request, client = self._head, self.client
        log = self._service.request_log
        if log is None or not log.bodies:
            self.body = b""  # nobody needs it any more
        self._service.counters.first_byte_s.add(now - self._started_at)
        answer = self._answer = Answer(head, method=request.method, path=request.path, http10=request.http10)
        extra = b"x-request-id: %b\r\n" % self.request_id
        if self.settings.expose_routing:
            extra += self._routing_lines()
        if answer.needs_close:
            client.keep_alive = False
        out = answer.head_bytes(http10=request.http10, keep_alive=client.keep_alive, extra=extra)
        whole = answer.take_whole(data, start)
        if whole is not None:
            client.transport.write(out + whole)
            self._complete(answer, now)
            return
        self._moved_at = now
        if client.write_paused:
            connection.transport.pause_reading()
        try:
            body = answer.take(data, start)
        except FramingError:
            client.transport.write(out)
            raise
        client.transport.write(out + body)
        self._passed(answer)

    def _routing_lines(self) -> bytes:
        attempt = self._attempt
        assert attempt is not None
        decision = attempt.decision
        name = attempt.name.encode("ascii", "replace").translate(None, b"\r\n\0")
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
            body = answer.take(data)
            if body:
                self.client.transport.write(body)
            if answer.news:
                self._passed(answer)

    def _passed(self, answer: Answer) -> None:
        """Some of the answer was passed on: see what it was."""
        answer.news = False
        if self._unseen_token and answer.first_token:
            self._first_token()
        if answer.done:
            self._complete(answer, self._service.clock())
        elif answer.cut_short:
            self._broken(REPLICA_BROKEN, "the stream ended without a mark of its end")

    def _first_token(self) -> None:
        self._unseen_token = False
        now = self._service.clock()
        ttft_s = self._ttft_s = now - self._started_at
        self._service.counters.ttft_s.add(ttft_s)
        if self._attempt is not None:
            self._attempt.first_token(now)

    def _complete(self, answer: Answer, now: float) -> None:
        """The answer's last byte was passed on."""
        service, attempt, client = self._service, self._attempt, self.client
        assert attempt is not None
        if attempt.booked:
            usage = answer.usage()
            attempt.finished(now, usage)
            if usage is not None:
                service.count_usage(usage)
            if service.request_log is not None:
                matched = attempt.decision.matched_tokens
                service.request_log.answered(
                    self._head, self.body, self._prompt, attempt.name, matched, usage, self._ttft_s
                )
        if client.write_paused and attempt.connection is not None:
            attempt.connection.transport.resume_reading()
        attempt.give_back(now, reusable=answer.reusable and not service.shutting_down)
        self._over(answer.status)
        if service.fleet.outbox:
            service.send_released(now)
        client.answered()

    # --- ends ------------------------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client left: the replica is to stop, now."""
        if not self.over:
            self._service.counters.client_disconnects += 1
            self._cancel()
            self._over(CLIENT_LEFT)

    def _cancel(self) -> None:
        """Stop waiting, or the attempt under way, by nobody's fault."""
        now = self._service.clock()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._service.drop_waiting(waiting, now)
        if self._attempt is not None:
            self._attempt.cancelled(now)

    def replica_lost(self, connection: ReplicaConnection, *, clean: bool, answered: bool) -> None:
        """The connection to the replica is gone. ``answered``: some bytes of an answer had come."""
        attempt = self._attempt
        if self.over or attempt is None or connection is not attempt.connection:
            return  # a kept one: what is missing shows when it is wanted
        answer = self._answer
        if answer is not None:
            if clean and answer.until_close:
                self._closed(answer)
            else:
                self._broken(REPLICA_BROKEN, "connection closed" if clean else "connection reset")
        elif connection.reused and not answered:
            attempt.send_again()  # it never saw the request
        else:
            self._attempt_failed(Failure.CLOSED, REPLICA_CLOSED, "closed" if clean else "reset")

    def _closed(self, answer: Answer) -> None:
        out = answer.closed()
        if out:
            self.client.transport.write(out)
        self._passed(answer)

    def replica_garbled(self) -> None:
        """What the replica sent is not HTTP."""
        if self.over:
            return
        if self._answer is not None:
            self._broken(REPLICA_BROKEN, "bad framing")
        else:
            self._attempt_failed(Failure.GARBAGE, REPLICA_GARBAGE, "not HTTP")

    def _broken(self, error: RouterError, why: str, *, fault: bool = True) -> None:
        """The answer cannot be completed: the client must not take it for whole."""
        service, answer, attempt, client = self._service, self._answer, self._attempt, self.client
        assert answer is not None and attempt is not None
        now = service.clock()
        if fault:
            attempt.failed(now, Failure.BROKEN)
        attempt.cancelled(now)
        service.counters.broken_streams += 1
        service.count_error(error)
        service.failures.log(
            "answer to %s broke off on replica %s: %s (%s)",
            self.request_id.decode(),
            attempt.name,
            error.code,
            why,
        )
        last = answer.broken_off(error, self.request_id.decode(), self._detail())
        self._over(answer.status)
        client.broken_off(last, reset=answer.needs_close)

    def _refuse(self, error: RouterError) -> None:
        """The client gets the router's own error."""
        client, detail = self.client, self._detail()
        self._service.count_error(error)
        self._over(error.status)
        client.refused(error, self.request_id.decode(), head_only=self._head.method == b"HEAD", detail=detail)

    def fail(self, error: RouterError) -> None:
        """End the request by the router's own will or fault."""
        if self.over:
            return
        if self._answer is not None:
            self._broken(error, "ended by the router", fault=False)
        else:
            self._cancel()
            self._refuse(error)

    def failed_inside(self) -> None:
        """A fault of the router's own was raised while it worked on this request."""
        self.fail(INTERNAL)

    def shut_down(self) -> None:
        """The router stops and waits no longer."""
        self.fail(SHUTTING_DOWN)

    def _detail(self) -> str:
        attempt = self._attempt
        return f"replica {attempt.name}" if attempt is not None and self.settings.expose_replica_urls else ""

    def _over(self, status: int) -> None:
        """The request is over, exactly once, its attempts before it. ``status``: what the client got."""
        assert not self.over
        self.over = True
        service, attempt = self._service, self._attempt
        self._attempt = None  # the two refer to each other
        service.counters.in_flight -= 1
        service.count_request(attempt.name if attempt is not None else "", status)
        if self._kept is not None:
            self._drop_kept()
        self.client.exchange = None

    # --- limits, and a slow client ---------------------------------------------------------------

    def sweep(self, now: float) -> None:
        """Look at this request's limits."""
        settings, attempt = self.settings, self._attempt
        if self._waiting is not None:
            if now - self._started_at > settings.hold_max_wait_s:
                self.fail(HOLD_TIMEOUT.at(settings.hold_max_wait_s))
                return
        elif self._answer is None:
            if attempt is not None and self._attempt_overdue(attempt, now):
                return
        elif self._moved or self.client.write_paused:
            if self._moved and attempt is not None:
                attempt.progressed(now)
            self._moved = False
            self._moved_at = now
        elif now - self._moved_at > settings.idle_s:
            self._broken(IDLE_TIMEOUT.at(settings.idle_s), "time-out")
            return
        elif attempt is not None and attempt.lost:
            self._broken(REPLICA_BROKEN, "it answers nobody and was removed")
            return
        if settings.total_s is not None and now - self._started_at > settings.total_s:
            self.fail(TOTAL_TIMEOUT.at(settings.total_s))

    def _attempt_overdue(self, attempt: Attempt, now: float) -> bool:
        waited_s = now - attempt.sent_at
        if attempt.waits_for_answer:
            if attempt.unreachable and self._leave(attempt, now):
                return False
            limit_s = self.settings.first_byte_s
            if waited_s > limit_s:
                self._attempt_failed(Failure.FIRST_BYTE_TIMEOUT, FIRST_BYTE_TIMEOUT.at(limit_s), "time-out")
                return True
        elif waited_s > self.settings.connect_s:
            error = CONNECT_TIMEOUT.at(self.settings.connect_s)
            self._attempt_failed(Failure.CONNECT, error, "time-out")
            return True
        return False

    def client_paused(self) -> None:
        """The client does not take what is sent: neither do we take more."""
        connection = self._passing_connection()
        if connection is not None:
            connection.transport.pause_reading()

    def client_resumed(self) -> None:
        """The client takes bytes again."""
        connection = self._passing_connection()
        if connection is not None:
            connection.transport.resume_reading()

    def _passing_connection(self) -> ReplicaConnection | None:
        attempt = self._attempt
        if self._answer is None or attempt is None or attempt.connection is None:
            return None
        return attempt.connection if attempt.connection.usable else None


def _failure_of(head: ResponseHead) -> Failure | None:
    """What an error status says about the replica; None: it is well, the request is at fault."""
    status = head.status
    if status == 429 or (status == 503 and head.retry_after):
        return Failure.BUSY
    return Failure.STATUS_5XX if status in (500, 502, 503, 504) else None
