"""Passes one answer on: the replica's bytes to the client as they come, what they mean to the fleet."""

from typing import TYPE_CHECKING

from router.proxy.answer import Answer
from router.proxy.attempt import Attempt
from router.proxy.body_framing import FramingError
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import FIRST_BYTE_TIMEOUT, IDLE_TIMEOUT, REPLICA_BROKEN, RouterError
from router.proxy.service import Service
from router.routing.in_flight import Usage
from router.routing.retry import Failure

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange


class Relay:
    """Owned by its exchange, which is over when the answer is, whole or broken."""

    __slots__ = (
        "_answer",
        "_attempt",
        "_client",
        "_exchange",
        "_moved",
        "_moved_at",
        "_service",
        "_unseen_token",
        "ttft_s",
        "usage",
    )

    def __init__(self, service: Service, exchange: "Exchange", attempt: Attempt, head: ResponseHead) -> None:
        request = exchange.head
        self._service = service
        self._exchange = exchange
        self._client = exchange.client
        self._attempt = attempt
        self._answer = Answer(head, method=request.method, path=request.path, http10=request.http10)
        self._unseen_token = exchange.prompt.stream
        self.ttft_s: float | None = None
        self.usage: Usage | None = None
        """What the replica reported, once the answer is complete."""
        self._moved = False
        """Bytes came since the last sweep."""
        self._moved_at = 0.0

    # --- from the replica ------------------------------------------------------------------------

    def begin(self, connection: ReplicaConnection, data: bytes, start: int, now: float) -> None:
        """Pass the head on, and what there is of the body: ``data[start:]``. Raises ``FramingError``."""
        exchange, answer, client = self._exchange, self._answer, self._client
        if answer.needs_close:
            client.keep_alive = False
        out = answer.head_bytes(
            http10=exchange.head.http10,
            keep_alive=client.keep_alive,
            request_id=exchange.request_id,
            extra=_routing_lines(self._attempt) if exchange.settings.expose_routing else b"",
            cors=exchange.cors_lines,
        )
        whole = answer.take_whole(data, start)
        if whole is not None:
            client.write(out + whole)
            self._complete(now)
            return
        self._moved_at = now
        if client.write_paused:
            connection.transport.pause_reading()
        try:
            body = answer.take(data, start)
        except FramingError:
            client.write(out)
            raise
        client.write(out + body)
        self._passed()

    def continued(self, data: bytes) -> None:
        """More of the body. Raises ``FramingError``."""
        self._moved = True
        answer = self._answer
        body = answer.take(data)
        if body:
            self._client.write(body)
        if answer.news:
            self._passed()

    def lost(self, *, clean: bool) -> None:
        """The connection to the replica is gone: in good order if ``clean``, which may be the regular end."""
        answer = self._answer
        if clean and answer.until_close:
            out = answer.closed()
            if out:
                self._client.write(out)
            self._passed()
        else:
            self.broken(REPLICA_BROKEN, "connection closed" if clean else "connection reset")

    def _passed(self) -> None:
        """Some of the answer was passed on: see what it was."""
        answer = self._answer
        answer.news = False
        if self._unseen_token and answer.first_token:
            self._first_token()
        if answer.done:
            self._complete(self._service.clock())
        elif answer.cut_short:
            self.broken(REPLICA_BROKEN, "the stream ended without a mark of its end")

    def _first_token(self) -> None:
        self._unseen_token = False
        now = self._service.clock()
        ttft_s = self.ttft_s = now - self._exchange.started_at
        self._service.counters.ttft_s.add(ttft_s)
        exchange = self._exchange
        if exchange.tries is not None:
            exchange.tries.row.ttft_s = ttft_s
        if exchange.admission is not None:
            exchange.admission.first_token(ttft_s)
        self._attempt.first_token(now)

    # --- ends ------------------------------------------------------------------------------------

    def _complete(self, now: float) -> None:
        """The answer's last byte was passed on."""
        service, exchange, attempt, client = self._service, self._exchange, self._attempt, self._client
        answer = self._answer
        if attempt.booked:
            usage = self.usage = answer.usage()
            exchange.answered(attempt, usage, self.ttft_s, now)
        if client.write_paused and attempt.connection is not None:
            attempt.connection.transport.resume_reading()
        attempt.give_back(now, reusable=answer.reusable and not service.shutting_down)
        exchange.end(answer.status)
        if service.fleet.outbox:
            service.send_released(now)
        client.answered()

    def broken(self, error: RouterError, why: str, *, fault: bool = True) -> None:
        """The answer stays incomplete; its client must not take it for whole. ``fault``: the replica's."""
        service, exchange, attempt = self._service, self._exchange, self._attempt
        answer, client = self._answer, self._client
        now = service.clock()
        exchange.error_code = error.code
        if fault:
            attempt.failed(now, Failure.BROKEN)
        attempt.cancelled(now)
        service.counters.broken_streams += 1
        service.count_error(error)
        request_id = exchange.request_id.decode()
        service.failures.log(
            "answer to %s broke off on replica %s: %s (%s)", request_id, attempt.name, error.code, why
        )
        last = answer.broken_off(error, request_id, exchange.detail)
        exchange.end(answer.status)
        client.broken_off(last, reset=answer.needs_close)

    # --- limits, and a slow client ---------------------------------------------------------------

    def stalled(self, now: float) -> bool:
        """Look whether the answer still moves. True if it does not, and was broken off."""
        settings = self._exchange.settings
        limit_s, limit = settings.idle_s, IDLE_TIMEOUT
        if self._unseen_token:
            if settings.first_byte_s > limit_s:  # a head alone, or who will speak, is no answer yet
                limit_s, limit = settings.first_byte_s, FIRST_BYTE_TIMEOUT
            self._attempt.still_waits(now)
        if self._moved or self._client.write_paused:
            if self._moved:
                self._attempt.progressed(now)
            self._moved = False
            self._moved_at = now
        elif now - self._moved_at > limit_s:
            self.broken(limit.at(limit_s), "time-out")
            return True
        elif self._attempt.lost:
            self.broken(REPLICA_BROKEN, "it answers nobody and was removed")
            return True
        return False

    def pause(self) -> None:
        """The client does not take what is sent: neither do we take more."""
        connection = self._attempt.connection
        if connection is not None and connection.usable:
            connection.transport.pause_reading()

    def resume(self) -> None:
        """The client takes bytes again."""
        connection = self._attempt.connection
        if connection is not None and connection.usable:
            connection.transport.resume_reading()


def _routing_lines(attempt: Attempt) -> bytes:
    """``expose_routing``: where the request went and why, as header lines."""
    decision = attempt.decision
    name = attempt.name.encode("ascii", "replace").translate(None, b"\r\n\0")
    return b"x-warmroute-replica: %b\r\nx-warmroute-reason: %b\r\nx-warmroute-matched-tokens: %d\r\n" % (
        name,
        decision.reason.value.encode(),
        decision.matched_tokens,
    )
