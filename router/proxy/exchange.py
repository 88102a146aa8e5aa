"""One request that came in through the router's own port: decide, send, pass the answer on, end once.

No task and no timer belongs to a request: it lives in the callbacks of the two connections, and the data
plane's sweep looks at its limits. ``submission.py`` has it until the fleet has, ``tries.py`` until a replica
has an answer for the client, then ``relay.py``. Whatever happens, ``end`` runs exactly once.
"""

from typing import TYPE_CHECKING, Final

from router.proxy.admission import CLIENT_LEFT, Admission
from router.proxy.booked import booked_beside
from router.proxy.forwarding import Forwarding
from router.proxy.prefill_step import PrefillStep
from router.proxy.relay import Relay
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.replica_pool import ReplicaPool
from router.proxy.request_head import BODILESS, RequestHead
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import (
    HOLD_TIMEOUT,
    INTERNAL,
    NO_REPLICA,
    SHUTTING_DOWN,
    TOTAL_TIMEOUT,
    RouterError,
)
from router.proxy.service import Service
from router.proxy.submission import Submission
from router.proxy.traced_request import Sent, traced
from router.proxy.tries import Tries
from router.routing.decision import NoReplica
from router.routing.in_flight import InFlight
from router.routing.kv_route import KvPull, Step

if TYPE_CHECKING:
    from router.proxy.client_connection import ClientConnection
    from router.proxy.tracing import Trace


SHORT_BODY_BYTES: Final = 16 * 1024
"""So much of a body is copied behind its head, to be written with it."""


class Exchange(Submission):
    """One request. Made by its client connection, which calls ``submit`` and then waits for ``answered``."""

    __slots__ = (
        "_client_keys",
        "_lines",
        "_prefill",
        "_trace",
        "client",
        "cors_lines",
        "relay",
        "tries",
    )

    def __init__(
        self,
        service: Service,
        client: "ClientConnection",
        head: RequestHead,
        body: bytes,
        request_id: bytes,
        forwarding: Forwarding,
        trace: "Trace | None",
    ) -> None:
        admission = None if forwarding.caller is None else Admission(forwarding.caller)
        super().__init__(service, head, body, request_id, admission)
        self.client = client
        self._client_keys = forwarding.client_keys
        self.cors_lines = forwarding.cors_lines
        """Header lines of the answer."""
        self._lines = forwarding.lines if trace is None else trace.lines + forwarding.lines
        self._trace = trace
        self._prefill: PrefillStep | None = None
        """Set while a prefill replica computes the prompt for the one that will answer."""
        self.tries: Tries | None = None
        """Set from when it was first sent until it is over."""
        self.relay: Relay | None = None
        """Set while an answer is passed on."""

    # --- to replicas -----------------------------------------------------------------------------

    @property
    def may_split(self) -> bool:
        """The router runs both steps, or a sidecar does."""
        return self.service.fleet.moves_kv

    def begin(self, flight: InFlight, now: float) -> None:
        """The fleet has booked the request on a replica: send it there."""
        route = flight.decision.route
        if route is None or route.step is not Step.PREFILL:
            self._send(Tries(self.service, self, flight, now), now)
        elif flight.replica.spec.kv_pull is KvPull.LLMD:
            self._begin_beside(flight, now)
        else:
            step = self._prefill = PrefillStep(self.service, self, flight, now)
            step.begin(now)

    def _begin_beside(self, first: InFlight, now: float) -> None:
        """A sidecar runs both steps: one request, two bookings."""
        head = self.head
        try:
            flight, beside = booked_beside(
                self.service, self.prompt, first, now, head.session, head.policy, self.within
            )
        except NoReplica:
            self.refuse(NO_REPLICA)
            return
        self._send(Tries(self.service, self, flight, now, beside), now)

    def step_over(self, answerer: InFlight | None, kv_params: bytes, now: float) -> None:
        """The first step is over; the second is booked on ``answerer``, which is told ``kv_params``.

        ``None``: no replica is left.
        """
        self._prefill = None
        if answerer is None:
            self.refuse(NO_REPLICA)
        else:
            self._send(Tries(self.service, self, answerer, now, None, kv_params), now)

    def _send(self, tries: Tries, now: float) -> None:
        self.tries = tries
        tries.begin(now)

    def message(self, pool: ReplicaPool, body: bytes, more: bytes = b"") -> tuple[bytes, bytes]:
        """A request with ``body``, in the two pieces of ``Asker.request``.

        With the replica's key, or the client's if that is passed on. ``more``: lines of the router's own.
        """
        head, size = self.head, len(body)
        short, rest = (body, b"") if size <= SHORT_BODY_BYTES else (b"", body)
        length = b"content-length: %d\r\n" % size if size or head.method not in BODILESS else b""
        first = b"%b %b HTTP/1.1\r\n%b%b%b%bx-request-id: %b\r\n%b\r\n%b" % (
            head.method,
            head.target,
            pool.host_line,
            pool.key_line or self._client_keys,
            self._lines,
            more,
            self.request_id,
            length,
            short,
        )
        return first, rest

    def body_for(self, pool: ReplicaPool) -> bytes:
        """The client's body, with the tenant's cache salt if the replica takes it."""
        return self.body if pool.takes_salt else self.plain_body

    def pass_on(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> None:
        """This answer, of the current attempt, is the client's. Raises ``FramingError``."""
        service, tries = self.service, self.tries
        assert tries is not None
        log = service.request_log
        if log is None or not log.bodies:
            self.body = b""
        service.counters.first_byte_s.add(now - self.started_at)
        relay = self.relay = Relay(service, self, tries.attempt, head)
        relay.begin(connection, data, start, now)

    # --- from the client's side ------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client left: the replica is to stop, now."""
        if not self.over:
            self.service.counters.client_disconnects += 1
            self._cancel()
            self.end(CLIENT_LEFT)

    def client_paused(self) -> None:
        """The client does not take what is sent."""
        if self.relay is not None:
            self.relay.pause()

    def client_resumed(self) -> None:
        """The client takes bytes again."""
        if self.relay is not None:
            self.relay.resume()

    # --- ends ------------------------------------------------------------------------------------

    def _cancel(self) -> None:
        """Stop waiting, or the attempt under way, by nobody's fault."""
        now = self.service.clock()
        self.stop_waiting(now)
        if self._prefill is not None:
            self._prefill.cancel(now)
        if self.tries is not None:
            self.tries.attempt.cancelled(now)

    def refuse(self, error: RouterError) -> None:
        """The client gets the router's own error."""
        client, detail = self.client, self.detail
        self.count_refusal(error)
        self.end(error.status)
        client.refused(error, self.request_id.decode(), head_only=self.head.method == b"HEAD", detail=detail)

    def fail(self, error: RouterError) -> None:
        """End the request by the router's own will or fault."""
        if self.over:
            return
        if self.relay is not None:
            self.relay.broken(error, "ended by the router", fault=False)
        else:
            self._cancel()
            self.refuse(error)

    def failed_inside(self) -> None:
        """A fault of the router's own was raised while it worked on this request."""
        self.fail(INTERNAL)

    def shut_down(self) -> None:
        """The router stops and waits no longer."""
        self.fail(SHUTTING_DOWN)

    @property
    def detail(self) -> str:
        """What an error says beyond its message, where the config allows it."""
        tries = self.tries
        return (
            f"replica {tries.attempt.name}" if tries is not None and self.settings.expose_replica_urls else ""
        )

    def end(self, status: int) -> None:
        """The request is over, exactly once, its attempts before it. ``status``: what the client got."""
        self.settle(status, answered=self.relay is not None)
        if self._trace is not None:
            self._trace.ended(traced(self, status, self._sent(), self.relay))
        service, tries = self.service, self.tries
        self.tries = self.relay = self._prefill = None  # they refer to this
        if tries is None:
            service.count_request("", status)
        else:
            service.count_request(tries.attempt.name, status)
            tries.row.status = status
            tries.drop_kept()
        self.client.exchange = None

    def _sent(self) -> Sent | None:
        tries = self.tries
        if tries is None:
            return None
        attempt = tries.attempt
        return Sent(attempt.name, attempt.decision, tries.began_at - self.started_at, tries.count)

    def sweep(self, now: float) -> None:
        """Look at this request's limits."""
        settings = self.settings
        if self.waiting is not None:
            if now - self.started_at > settings.hold_max_wait_s:
                self.fail(HOLD_TIMEOUT.at(settings.hold_max_wait_s))
                return
        elif self.relay is not None:
            if self.relay.stalled(now):
                return
        elif self._prefill is not None:
            if self._prefill.overdue(now):
                return
        elif self.tries is not None and self.tries.overdue(now):
            return
        if settings.total_s is not None and now - self.started_at > settings.total_s:
            self.fail(TOTAL_TIMEOUT.at(settings.total_s))
