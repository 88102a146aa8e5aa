"""One request of a gateway's: pick endpoints for it, follow the answer, settle once.

Messages come in by ``take``, replies are left in ``out``. ``submission.py`` has it from when it is complete
until the fleet has it.
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
from router.proxy.forwarding import admitted
from router.proxy.recent import RecentDecision
from router.proxy.router_error import (
    BODY_HIDDEN,
    BODY_TOO_LARGE,
    GATEWAY_ORDER,
    HOLD_TIMEOUT,
    INTERNAL,
    NO_REPLICA,
    TRAILERS_ALONE,
    RouterError,
)
from router.proxy.service import Service
from router.proxy.submission import Submission
from router.routing.decision import NoReplica
from router.routing.in_flight import InFlight
from router.routing.kv_route import Step
from router.routing.retry import Failure


class Pick(Submission):
    """One request, from its head to the end of its answer. Lives in the loop it was made in."""

    def __init__(self, service: Service, endpoints: Endpoints, decided: Callable[[], None]) -> None:
        """``decided`` is called when a request that had to wait has replies in ``out``."""
        self.out: list[bytes] = []
        """Replies that are to be sent, in this order."""
        self._incoming = Incoming(self.out)
        super().__init__(service, self._incoming.head, b"", b"", None)
        self._endpoints = endpoints
        self._decided = decided
        self.head_at = service.clock()
        """When the head came."""
        self._asked = False
        """The request was complete, and its prompt asked for."""
        self.undecided = False
        """The pick is still to come, by itself: the prompt is being read, or all replicas are busy."""
        self._deadline: asyncio.TimerHandle | None = None
        self._booked: Booked | None = None
        self._answer: ServedAnswer | None = None
        self._span = PickSpan(service)
        self.row: RecentDecision | None = None
        """What people see of the pick."""

    def take(self, message: ProcessingRequest) -> None:
        """The next message. Cost: that of ``submit``, when the request is complete."""
        kind = message.WhichOneof("request")
        if kind is not None and (kind == "request_headers") is self._incoming.begun:
            self.refuse(GATEWAY_ORDER)  # a head comes first, and once: it has the key
            return
        match kind:
            case "request_headers":
                self._request_headers(message)
            case "request_body":
                self._incoming.body_came(message.request_body)
                if self._incoming.body_bytes > self.settings.body_bytes:
                    self.refuse(BODY_TOO_LARGE.at(self.settings.body_bytes))
            case "request_trailers":
                self._incoming.trailers_came()
                if self._incoming.unanswerable:
                    self.refuse(TRAILERS_ALONE)
            case "response_headers":
                self._response_headers(message)
            case "response_body":
                self._response_body(message.response_body)
            case "response_trailers":
                self.out.append(messages.CONTINUE_RESPONSE_TRAILERS)
                self._complete()
        if self._incoming.complete and not (self._asked or self.over):
            self._asked = self.undecided = True
            self._span.begin(self)
            self.body = self._incoming.body()
            self.submit()

    # --- the request ------------------------------------------------------------------------------

    def _request_headers(self, message: ProcessingRequest) -> None:
        incoming = self._incoming
        incoming.begin(message)
        self.head = incoming.head
        self.request_id = self.head.request_id or self.service.new_request_id()
        self.asked = self._endpoints.within(incoming.subset)
        caller, refusal = admitted(self.settings, self.head, routed=True)
        if caller is not None:
            self.admission = Admission(caller)
            if refusal is None and incoming.body_hidden:
                refusal = BODY_HIDDEN  # whose salt could not be put in
        if refusal is not None:
            self.refuse(refusal)

    # --- the pick ---------------------------------------------------------------------------------

    @property
    def may_split(self) -> bool:
        """Where a sidecar runs both steps: Envoy asks one replica."""
        return self.service.fleet.replicas.sidecars and self.asked is None

    def hold_began(self) -> None:
        """The request waits in the router."""
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(self.settings.hold_max_wait_s, self._held_too_long)

    def _held_too_long(self) -> None:
        if self.waiting is not None:
            self.refuse(HOLD_TIMEOUT.at(self.settings.hold_max_wait_s))

    def begin(self, flight: InFlight, now: float) -> None:
        """The fleet has booked the request on a replica: name it, and who is next in line."""
        service, head = self.service, self.head
        beside = None
        route = flight.decision.route
        if route is not None and route.step is Step.PREFILL:
            try:
                flight, beside = booked_beside(
                    service, self.prompt, flight, now, head.session, head.policy, self.within
                )
            except NoReplica:
                self.refuse(NO_REPLICA)
                return
        booked = self._booked = Booked(service, flight, beside)
        self._span.picked(now - self.started_at)
        self.row = self._decided_now(booked, now)
        service.counters.decided(booked.name, booked.decision.reason)
        others = service.fleet.others(
            self.prompt,
            now,
            chosen=booked.decision.replica,
            count=self.settings.attempts - 1,
            session=head.session,
            policy=head.policy,
            within=self.within,
        )
        replicas = [flight.replica, *(service.fleet.replicas[index] for index in others)]
        salt_bytes = None if self.admission is None else self.salt_bytes
        self._incoming.picked(
            destination(
                service,
                self.settings,
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
        self._answer = ServedAnswer(self.service, self, booked, fields)
        if self.settings.expose_routing:
            self.out.append(messages.answer_head(_routing_fields(booked)))
        else:
            self.out.append(messages.CONTINUE_RESPONSE_HEADERS)
        if message.response_headers.end_of_stream:
            self._complete()

    def _served_by(self, endpoint: str, booked: Booked) -> Booked:
        """The booking on the replica at ``endpoint``, made now if the first that was named failed."""
        service, picked = self.service, booked.decision.replica
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
        return self.service.recent.decided(now, self.request_id, booked.name, booked.decision, self.prompt)

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
        """The client gets an answer of ours, in the place of a replica's if one was picked."""
        self._cancel()
        self.count_refusal(error)
        self.out.append(messages.refusal(error, self.request_id.decode()))
        self._end(error.status)
        self._leave_queue()

    def failed_inside(self) -> None:
        """A fault of our own was raised: the client is told so, if it has no answer yet."""
        if self.over:
            return
        self.out.clear()
        if self._answer is None:
            self.refuse(INTERNAL)
        else:
            self._cancel()
            self._end(self._answer.status)

    def gone(self) -> None:
        """Envoy closed the stream: the client left, but where the end of the answer was not to be seen."""
        if self.over:
            return
        if self._answer is not None and not self._incoming.answer_seen:
            self._complete()
            return
        self.service.counters.client_disconnects += 1
        self._cancel()
        self._end(CLIENT_LEFT)

    def _cancel(self) -> None:
        """Stop waiting, or give the booking back, by nobody's fault."""
        now = self.service.clock()
        self.stop_waiting(now)
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
        self.settle(status, answered=self._answer is not None)
        self._span.ended(self, self._booked, self._answer, status)
        self.service.count_request("" if self._booked is None else self._booked.name, status)
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
