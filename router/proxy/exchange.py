"""One request between its client and the replicas: decide, send, pass the answer on, end once.

No task and no timer belongs to a request: it lives in the callbacks of the two connections, and the data
plane's sweep looks at its limits. Until a replica has an answer for the client ``tries.py`` has it, then
``relay.py``. Whatever happens, ``end`` runs exactly once.
"""

import asyncio
import logging
from typing import TYPE_CHECKING, Final

from router.proxy.admission import CLIENT_LEFT, Admission
from router.proxy.asker import Asker
from router.proxy.booked import booked_beside
from router.proxy.crowded_body import CHECK_FROM_BYTES, Parser, parser_of, promises_many
from router.proxy.forwarding import Forwarding
from router.proxy.prefill_request import with_transfer_params
from router.proxy.prefill_step import PrefillStep
from router.proxy.relay import Relay
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.replica_pool import ReplicaPool
from router.proxy.request_head import RequestHead, last_lines
from router.proxy.response_head import ResponseHead
from router.proxy.router_error import (
    BODY_CROWDED,
    HOLD_TIMEOUT,
    INTERNAL,
    NO_REPLICA,
    OUT_OF_SOCKETS,
    REPLICA_BROKEN,
    REPLICA_CLOSED,
    REPLICA_GARBAGE,
    REPLICA_UNREACHABLE,
    SHUTTING_DOWN,
    TOTAL_TIMEOUT,
    RouterError,
)
from router.proxy.service import Service
from router.proxy.submission import submitted
from router.proxy.tenancy import Caller
from router.proxy.tenant_request import take_in, without_salt
from router.proxy.traced_request import Sent, traced
from router.proxy.tries import Tries
from router.routing.decision import NoReplica, Reason
from router.routing.flat_request import whole_request
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.kv_route import KvPull, Step
from router.routing.prompt_blocks import UNREADABLE, Prompt, read_prompt, text_prompt
from router.routing.retry import Failure

if TYPE_CHECKING:
    from router.proxy.client_connection import ClientConnection
    from router.proxy.tracing import Trace

logger = logging.getLogger("warmroute.proxy")

_WHOLE: Final[Parser] = whole_request


class Exchange(Asker):
    """One request. Made by its client connection, which calls ``start`` and then waits for ``answered``."""

    __slots__ = (
        "_client_keys",
        "_kv_params",
        "_lines",
        "_prefill",
        "_salt_bytes",
        "_service",
        "_trace",
        "_waiting",
        "admission",
        "body",
        "client",
        "cors_lines",
        "error_code",
        "head",
        "over",
        "prompt",
        "relay",
        "request_id",
        "started_at",
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
        super().__init__(service.settings)
        self._service = service
        self.client = client
        self.head = head
        self.body = body
        """Empty once nobody needs it any more."""
        self.request_id = request_id
        self._client_keys = forwarding.client_keys
        self.cors_lines = forwarding.cors_lines
        """Header lines of the answer."""
        self._lines = forwarding.lines if trace is None else trace.lines + forwarding.lines
        self._trace = trace
        self.admission = None if forwarding.caller is None else Admission(forwarding.caller)
        """Set where tenants are told apart."""
        self._salt_bytes = 0
        """Of the body's end: the tenant's cache salt."""
        self.prompt: Prompt = UNREADABLE
        self.started_at = 0.0
        self._waiting: Held | None = None
        """Set while the request waits in the router for its replica."""
        self._prefill: PrefillStep | None = None
        """Set while a prefill replica computes the prompt for the one that will answer."""
        self._kv_params = b""
        """What it said of where the KV lies, if the one who answers is to be told."""
        self.tries: Tries | None = None
        """Set from when it was first sent until it is over."""
        self.relay: Relay | None = None
        """Set while an answer is passed on."""
        self.error_code = ""
        """Of the router's own error that the client got, or that broke its answer off."""
        self.over = False

    # --- before it is sent -----------------------------------------------------------------------

    def start(self) -> None:
        """Choose a replica and send the request there."""
        service = self._service
        now = self.started_at = service.clock()
        service.counters.in_flight += 1
        service.budget.earn()
        body = self.body
        if len(body) >= CHECK_FROM_BYTES and promises_many(body):
            # Taking in the body's last bytes was one turn of the loop, this is another.
            asyncio.get_running_loop().call_soon(self._start_crowded)
        elif self.admission is not None:
            self._start_of(self.admission.caller, now, _WHOLE)
        elif body[:1] == b"{" or body[:64].lstrip()[:1] == b"{":
            if service.prompt_reader is not None:
                service.prompt_reader.read(body, self._prompt_read, _WHOLE)
                return
            self.prompt = read_prompt(body)
            self._choose(now)
        else:
            self._choose(now)

    def _start_crowded(self) -> None:
        """The same where the body seems to have very many values: each step is a turn of the loop."""
        if self.over:
            return
        try:
            body, parse = self.body, parser_of(self.body)
            if parse is None:
                self.refuse(BODY_CROWDED)
            elif self.admission is not None:
                self._start_of(self.admission.caller, self._service.clock(), parse)
            elif body[:64].lstrip()[:1] != b"{":
                self._choose(self._service.clock())
            elif self._service.prompt_reader is not None:
                self._service.prompt_reader.read(body, self._prompt_read, parse)
            else:
                request = parse(body)
                prompt = UNREADABLE if request is None else text_prompt(request)
                asyncio.get_running_loop().call_soon(self._prompt_read, prompt)
        except Exception:
            logger.exception("a fault of the router's own")
            self.failed_inside()

    def _start_of(self, caller: Caller, now: float, parse: Parser) -> None:
        """The same where tenants are told apart."""
        taken = take_in(caller, self.head, self.body, parse)
        if isinstance(taken, RouterError):
            self.refuse(taken)
            return
        self.body, request, self._salt_bytes = taken
        if request is None:
            self.prompt = caller.owned(Prompt(keys=(), units=0))
        elif self._service.prompt_reader is not None:
            self._service.prompt_reader.read(self.body, self._prompt_read, parse)
            return
        else:
            self.prompt = caller.owned(text_prompt(request))
        self._choose(now)

    def _prompt_read(self, prompt: Prompt) -> None:
        """The prompt reader is done, at once or after a while."""
        if not self.over:
            self.prompt = prompt if self.admission is None else self.admission.caller.owned(prompt)
            self._choose(self._service.clock())

    def _choose(self, now: float) -> None:
        service = self._service
        fleet = service.fleet
        outcome = submitted(
            service,
            self.settings,
            self.head,
            self.prompt,
            self.body,
            self.admission,
            self,
            self.started_at,
            now,
            None,
            moves_kv=fleet.moves_kv,
        )
        if isinstance(outcome, InFlight):
            self._begin(outcome, now)
        elif isinstance(outcome, Held):
            self._waiting = outcome
        else:
            self.refuse(outcome)
            return
        if fleet.outbox:
            service.send_released(now)

    def hold_ended(self, flight: InFlight | None, now: float) -> None:
        """The request waited in the router until now; without a ``flight`` no replica is left for it."""
        self._waiting = None
        if self.admission is not None:
            self.admission.held(False)
        if flight is None:
            self.refuse(NO_REPLICA)
        else:
            self._begin(flight, now)

    def _begin(self, flight: InFlight, now: float) -> None:
        """The fleet has booked the request on a replica: send it there."""
        route = flight.decision.route
        if route is not None and route.step is Step.PREFILL:
            if flight.replica.spec.kv_pull is KvPull.LLMD:
                self._begin_beside(flight, now)
                return
            step = self._prefill = PrefillStep(self._service, self, flight, now)
            step.begin(now)
            return
        tries = self.tries = Tries(self._service, self, flight, now)
        tries.begin(now)

    # --- in two steps ----------------------------------------------------------------------------

    def _begin_beside(self, first: InFlight, now: float) -> None:
        """A sidecar runs both steps: one request, two bookings."""
        head = self.head
        try:
            flight, beside = booked_beside(self._service, self.prompt, first, now, head.session, head.policy)
        except NoReplica:
            self.refuse(NO_REPLICA)
            return
        tries = self.tries = Tries(self._service, self, flight, now, beside)
        tries.begin(now)

    def step_over(self, answerer: InFlight | None, kv_params: bytes, now: float) -> None:
        """The first step is over; the second is booked on ``answerer``, which is told ``kv_params``.

        ``None``: no replica is left.
        """
        self._prefill = None
        self._kv_params = kv_params
        if answerer is None:
            self.refuse(NO_REPLICA)
        else:
            self._begin(answerer, now)

    # --- from the replica's side -----------------------------------------------------------------

    def request(self, pool: ReplicaPool) -> tuple[bytes, bytes]:
        """Head and body for the replica of ``pool``; with where its KV can be had, if it is to pull."""
        body, source = self.body_for(pool), b""
        assert self.tries is not None
        decision = self.tries.attempt.decision
        if decision.route is not None and decision.route.step is Step.PULL:
            if self._kv_params and decision.reason is Reason.HANDOFF:
                # For one replica, once: the next one tried goes there for another reason.
                body = with_transfer_params(body, self._kv_params)
            else:
                named = self._service.kv_source(decision)
                if named is not None:
                    source = b"%b: %b\r\n" % (named[0].encode(), named[1].encode())
        return self.head_for(pool, body, source), body

    def head_for(self, pool: ReplicaPool, body: bytes, more: bytes = b"") -> bytes:
        """The head of a request with ``body``: with the replica's key, or the client's if that is passed on.

        ``more``: lines of the router's own.
        """
        head = self.head
        return b"%b %b HTTP/1.1\r\n%b%b%b%b%b" % (
            head.method,
            head.target,
            pool.host_line,
            pool.key_line or self._client_keys,
            self._lines,
            more,
            last_lines(head, self.request_id, len(body)),
        )

    def body_for(self, pool: ReplicaPool) -> bytes:
        """The client's body, with the tenant's cache salt if the replica takes it."""
        return self.body if pool.takes_salt else self.plain_body

    @property
    def plain_body(self) -> bytes:
        """The body without the tenant's cache salt."""
        return without_salt(self.body, self._salt_bytes)

    def connect_failed(self, why: str, *, own: bool) -> None:
        """The attempt could make no connection. ``own``: because this process had no socket for it."""
        assert self.tries is not None
        if own:
            self.tries.failed(Failure.NO_SOCKET, OUT_OF_SOCKETS, "no socket left")
        else:
            self.tries.failed(Failure.CONNECT, REPLICA_UNREACHABLE, why)

    def answer_began(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int
    ) -> None:
        """An answer's head is here, and in ``data[start:]`` some of its body. Raises ``FramingError``."""
        tries, now = self.tries, self._service.clock()
        assert tries is not None
        if head.status >= 400 and tries.refused(connection, head, data, start, now):
            return
        tries.drop_kept()
        self.pass_on(connection, head, data, start, now)

    def pass_on(
        self, connection: ReplicaConnection, head: ResponseHead, data: bytes, start: int, now: float
    ) -> None:
        """This answer, of the current attempt, is the client's. Raises ``FramingError``."""
        service, tries = self._service, self.tries
        assert tries is not None
        log = service.request_log
        if log is None or not log.bodies:
            self.body = b""
        service.counters.first_byte_s.add(now - self.started_at)
        relay = self.relay = Relay(service, self, tries.attempt, head)
        relay.begin(connection, data, start, now)

    def answer_continued(self, data: bytes) -> None:
        """More of the answer's body. Raises ``FramingError``."""
        if self.relay is not None:
            self.relay.continued(data)

    def replica_lost(self, connection: ReplicaConnection, *, clean: bool, answered: bool) -> None:
        """The connection to the replica is gone. ``answered``: some bytes of an answer had come."""
        tries = self.tries
        if tries is None or connection is not tries.attempt.connection:
            return  # a kept one: what is missing shows when it is wanted
        if self.relay is not None:
            self.relay.lost(clean=clean)
        elif connection.reused and not answered:
            tries.attempt.send_again()  # it never saw the request
        else:
            tries.failed(Failure.CLOSED, REPLICA_CLOSED, "closed" if clean else "reset")

    def replica_garbled(self) -> None:
        """What the replica sent is not HTTP."""
        if self.relay is not None:
            self.relay.broken(REPLICA_BROKEN, "bad framing")
        elif self.tries is not None:
            self.tries.failed(Failure.GARBAGE, REPLICA_GARBAGE, "not HTTP")

    # --- from the client's side ------------------------------------------------------------------

    def client_gone(self) -> None:
        """The client left: the replica is to stop, now."""
        if not self.over:
            self._service.counters.client_disconnects += 1
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
        now = self._service.clock()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._service.drop_waiting(waiting, now)
        if self._prefill is not None:
            self._prefill.cancel(now)
        if self.tries is not None:
            self.tries.attempt.cancelled(now)

    def refuse(self, error: RouterError) -> None:
        """The client gets the router's own error."""
        client, detail = self.client, self.detail
        self.error_code = error.code
        self._service.count_error(error)
        if self.admission is not None:
            self.admission.caller.counters.turned(error.code)
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
        assert not self.over
        self.over = True
        if self._trace is not None:
            self._trace.ended(traced(self, status, self._sent(), self.relay))
        service, tries = self._service, self.tries
        if self.admission is not None:
            self.admission.ended(status, service.clock(), answered=self.relay is not None)
        self.tries = self.relay = self._prefill = None  # they refer to this
        service.counters.in_flight -= 1
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
        if self._waiting is not None:
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
