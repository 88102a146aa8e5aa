"""One request of a gateway's: pick endpoints for it, follow the answer, settle once.

Messages come in by ``take``, replies are left in ``out``.
"""

import asyncio
from collections.abc import Callable

from router.endpoint_picker import messages
from router.endpoint_picker.destination import destination
from router.endpoint_picker.endpoints import Endpoints
from router.endpoint_picker.ext_proc_pb2 import HttpBody, ProcessingRequest
from router.endpoint_picker.incoming import Incoming
from router.endpoint_picker.pick_span import PickSpan
from router.endpoint_picker.served_answer import WANTED, ServedAnswer
from router.proxy.admission import CLIENT_LEFT, Admission
from router.proxy.booked import Booked, booked_beside
from router.proxy.crowded_body import Parser, parser_of
from router.proxy.forwarding import admitted
from router.proxy.recent import RecentDecision
from router.proxy.request_head import RequestHead
from router.proxy.router_error import (
    BODY_CROWDED,
    BODY_HIDDEN,
    BODY_TOO_LARGE,
    HOLD_TIMEOUT,
    INTERNAL,
    NO_REPLICA,
    RouterError,
)
from router.proxy.service import Service
from router.proxy.submission import submitted
from router.proxy.tenancy import Caller
from router.proxy.tenant_request import take_in
from router.routing.decision import NoReplica
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.kv_route import Step
from router.routing.prompt_blocks import UNREADABLE, Prompt, text_prompt
from router.routing.retry import Failure


class Pick:
    """One request, from its head to the end of its answer. Lives in the loop it was made in."""

    def __init__(self, service: Service, endpoints: Endpoints, decided: Callable[[], None]) -> None:
        """``decided`` is called when a request that had to wait has replies in ``out``."""
        self._service = service
        self._endpoints = endpoints
        self._decided = decided
        self._settings = service.settings
        self.out: list[bytes] = []
        """Replies that are to be sent, in this order."""
        self.over = False
        self._asked = False
        """The request was complete, and its prompt asked for."""
        self.undecided = False
        """The pick is still to come, by itself: the prompt is being read, or all replicas are busy."""
        self._incoming = Incoming(self.out)
        self.body = b""
        """Empty once nobody needs it any more."""
        self.admission: Admission | None = None
        """Set where tenants are told apart."""
        self._salt_bytes = 0
        """Of the body's end: the tenant's cache salt."""
        self.prompt: Prompt = UNREADABLE
        self.request_id = b""
        self.started_at = service.clock()
        self._within: frozenset[int] | None = None
        self._waiting: Held | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._booked: Booked | None = None
        self._answer: ServedAnswer | None = None
        self.error_code = ""
        """Of our own error that the client got, or of the answer that broke off."""
        self._span = PickSpan(service)
        self.row: RecentDecision | None = None
        """What people see of the pick."""
        service.counters.in_flight += 1

    def take(self, message: ProcessingRequest) -> None:
        """The next message. Cost: that of reading the prompt, when the request is complete."""
        match message.WhichOneof("request"):
            case "request_headers":
                self._begin(message)
            case "request_body":
                self._incoming.body_came(message.request_body)
                if self._incoming.body_bytes > self._settings.body_bytes:
                    self.refuse(BODY_TOO_LARGE.at(self._settings.body_bytes))
            case "request_trailers":
                self._incoming.trailers_came()
            case "response_headers":
                self._response_headers(message)
            case "response_body":
                self._response_body(message.response_body)
            case "response_trailers":
                self.out.append(messages.CONTINUE_RESPONSE_TRAILERS)
                self._complete()
        if self._incoming.complete and not (self._asked or self.over):
            self._read_prompt()

    # --- the request ------------------------------------------------------------------------------

    @property
    def head(self) -> RequestHead:
        """The request's."""
        return self._incoming.head

    def _begin(self, message: ProcessingRequest) -> None:
        incoming = self._incoming
        incoming.begin(message)
        self.request_id = incoming.head.request_id or self._service.new_request_id()
        self._within = self._endpoints.within(incoming.subset)
        caller, refusal = admitted(self._settings, incoming.head, routed=True)
        if caller is not None:
            self.admission = Admission(caller)
            if refusal is None and incoming.body_hidden:
                refusal = BODY_HIDDEN  # whose salt could not be put in
        if refusal is not None:
            self.refuse(refusal)

    def _read_prompt(self) -> None:
        """All of the request is here that is to be seen."""
        service = self._service
        service.budget.earn()
        self._asked = self.undecided = True
        self._span.begin(self)
        body = self.body = self._incoming.body()
        parse = parser_of(body)
        if parse is None:
            self.refuse(BODY_CROWDED)
            return
        if self.admission is not None:
            self._read_prompt_of(self.admission.caller, parse)
            return
        if body[:64].lstrip()[:1] == b"{":
            if service.prompt_reader is not None:
                service.prompt_reader.read(body, self._prompt_read, parse)
                return
            request = parse(body)
            self.prompt = UNREADABLE if request is None else text_prompt(request)
        self._choose()

    def _read_prompt_of(self, caller: Caller, parse: Parser) -> None:
        """The same where tenants are told apart."""
        taken = take_in(caller, self.head, self.body, parse)
        if isinstance(taken, RouterError):
            self.refuse(taken)
            return
        self.body, request, self._salt_bytes = taken
        if request is None:
            self._prompt_read(Prompt(keys=(), units=0))
        elif self._service.prompt_reader is not None:
            self._service.prompt_reader.read(self.body, self._prompt_read, parse)
        else:
            self._prompt_read(text_prompt(request))

    def _prompt_read(self, prompt: Prompt) -> None:
        """The prompt is there, at once or after a while."""
        if not self.over:
            self.prompt = prompt if self.admission is None else self.admission.caller.owned(prompt)
            self._choose()

    # --- the pick ---------------------------------------------------------------------------------

    def _choose(self) -> None:
        service, settings = self._service, self._settings
        fleet, now = service.fleet, service.clock()
        outcome = submitted(
            service,
            settings,
            self.head,
            self.prompt,
            self.body,
            self.admission,
            self,
            now,
            now,
            self._within,
            moves_kv=fleet.replicas.sidecars and self._within is None,
        )
        if isinstance(outcome, InFlight):
            self._picked(outcome, now)
        elif isinstance(outcome, Held):
            self._waiting = outcome
            loop = asyncio.get_running_loop()
            self._deadline = loop.call_later(settings.hold_max_wait_s, self._held_too_long)
        else:
            self.refuse(outcome)
            return
        if fleet.outbox:
            service.send_released(now)

    def hold_ended(self, flight: InFlight | None, now: float) -> None:
        """The request waited until now; without a ``flight`` no replica is left for it."""
        self._waiting = None
        if self.admission is not None:
            self.admission.held(False)
        if flight is None:
            self.refuse(NO_REPLICA)
        else:
            self._picked(flight, now)

    def _held_too_long(self) -> None:
        if self._waiting is not None:
            self._cancel()
            self.refuse(HOLD_TIMEOUT.at(self._settings.hold_max_wait_s))

    def _picked(self, flight: InFlight, now: float) -> None:
        """The fleet has booked the request on a replica: name it, and who is next in line."""
        service, head = self._service, self.head
        beside = None
        route = flight.decision.route
        if route is not None and route.step is Step.PREFILL:
            try:
                flight, beside = booked_beside(service, self.prompt, flight, now, head.session, head.policy)
            except NoReplica:
                self.refuse(NO_REPLICA)
                return
        booked = self._booked = Booked(service, flight, beside)
        self._span.picked(now)
        self.row = self._decided_now(booked, now)
        service.counters.decided(booked.name, booked.decision.reason)
        others = service.fleet.others(
            self.prompt,
            now,
            chosen=booked.decision.replica,
            count=self._settings.attempts - 1,
            session=head.session,
            policy=head.policy,
            within=self._within,
        )
        replicas = [flight.replica, *(service.fleet.replicas[index] for index in others)]
        salt_bytes = None if self.admission is None else self._salt_bytes
        self._incoming.picked(
            destination(
                service,
                self._settings,
                self._endpoints,
                replicas,
                self.body,
                salt_bytes,
                kv_source=service.kv_source(booked.decision) if flight.pulled else None,
                trace=self._span.fields,
            )
        )
        log = service.request_log
        if log is None or not log.bodies:
            self.body = b""
        self._leave_queue()

    # --- the answer -------------------------------------------------------------------------------

    def _response_headers(self, message: ProcessingRequest) -> None:
        booked = self._booked
        if booked is None:  # an answer of the gateway's own, before there was a pick
            self.out.append(messages.CONTINUE_RESPONSE_HEADERS)
            self.gone()
            return
        served = messages.served_endpoint(message)
        if served is not None:
            booked = self._booked = self._served_by(served, booked)
        fields = messages.response_fields(message.response_headers, WANTED)
        self._answer = ServedAnswer(self._service, self, booked, fields)
        if self._settings.expose_routing:
            self.out.append(messages.answer_head(_routing_fields(booked)))
        else:
            self.out.append(messages.CONTINUE_RESPONSE_HEADERS)
        if message.response_headers.end_of_stream:
            self._complete()

    def _served_by(self, endpoint: str, booked: Booked) -> Booked:
        """The booking on the replica at ``endpoint``, made now if the first that was named failed."""
        service, picked = self._service, booked.decision.replica
        at = [replica.index for replica in self._endpoints.at(endpoint)]
        if picked in at:
            return booked
        now = service.clock()
        booked.failed(now, Failure.CLOSED)
        service.counters.retries += 1
        self._span.served_by_another()
        service.failures.log(
            "request %s was answered from %s: replica %s did not answer it",
            self.request_id.decode(),
            endpoint,
            booked.name,
        )
        if self.row is not None:
            self.row.retried = True
        try:
            head = self.head
            decision = service.fleet.decide(
                self.prompt, now, tried=(picked,), session=head.session, policy=head.policy, within=at
            )
        except NoReplica:  # it left meanwhile, or the gateway chose by itself: nothing to book
            return booked
        again = Booked(service, service.fleet.sent(self.prompt, decision, now))
        self.row = self._decided_now(again, now)
        return again

    def _decided_now(self, booked: Booked, now: float) -> RecentDecision:
        return self._service.recent.decided(now, self.request_id, booked.name, booked.decision, self.prompt)

    def _response_body(self, body: HttpBody) -> None:
        if self._incoming.answer_echoed:
            self.out.append(messages.streamed_answer(body.body, last=body.end_of_stream))
        else:
            self.out.append(messages.CONTINUE_RESPONSE_BODY)
        if self._answer is not None:
            self._answer.continued(body.body)
        if body.end_of_stream:
            self._complete()

    def _complete(self) -> None:
        """The answer's last byte went by."""
        if self._answer is not None and not self.over:
            self._answer.complete()
            self._end(self._answer.status)

    # --- ends -------------------------------------------------------------------------------------

    def refuse(self, error: RouterError) -> None:
        """The client gets an answer of ours."""
        self._service.count_error(error)
        self.error_code = error.code
        if self.admission is not None:
            self.admission.caller.counters.turned(error.code)
        self.out.append(messages.refusal(error, self.request_id.decode()))
        self._end(error.status)
        self._leave_queue()

    def failed_inside(self) -> None:
        """A fault of our own was raised: the client is told so, if it has no answer yet."""
        if self.over:
            return
        self._cancel()
        self.out.clear()
        if self._answer is None:
            self.refuse(INTERNAL)
        else:
            self._end(self._answer.status)

    def gone(self) -> None:
        """Envoy closed the stream: the client left, but where the end of the answer was not to be seen."""
        if self.over:
            return
        if self._answer is not None and not self._incoming.answer_seen:
            self._complete()
            return
        self._service.counters.client_disconnects += 1
        self._cancel()
        self._end(CLIENT_LEFT)

    def _cancel(self) -> None:
        """Stop waiting, or give the booking back, by nobody's fault."""
        now = self._service.clock()
        waiting, self._waiting = self._waiting, None
        if waiting is not None:
            self._service.drop_waiting(waiting, now)
        if self._booked is not None:
            self._booked.cancelled(now)

    def _leave_queue(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self.undecided:
            self.undecided = False
            self._decided()

    def _end(self, status: int) -> None:
        """Exactly once. ``status``: what the client got."""
        assert not self.over
        self.over = True
        self._span.ended(self, self._booked, self._answer, status)
        service = self._service
        if self.admission is not None:
            self.admission.ended(status, service.clock(), answered=self._answer is not None)
        service.counters.in_flight -= 1
        service.count_request("" if self._booked is None else self._booked.name, status)
        if self.row is not None:
            self.row.status = status
        if self._deadline is not None:
            self._deadline.cancel()


def _routing_fields(booked: Booked) -> dict[str, str]:
    """``expose_routing``: where the request went and why."""
    decision = booked.decision
    return {
        "x-warmroute-replica": booked.name,
        "x-warmroute-reason": decision.reason.value,
        "x-warmroute-matched-tokens": str(decision.matched_tokens),
    }
