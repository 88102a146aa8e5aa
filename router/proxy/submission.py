"""A request from when it is complete until the fleet has it: its prompt read, then refused, booked or held.

One way for requests that came in through the router's own port and for those that a gateway asks about.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Final

from router.proxy.admission import Admission
from router.proxy.booked import Booked
from router.proxy.crowded_body import CHECK_FROM_BYTES, Parser, marks_of, parser_for, promises_many
from router.proxy.entrance import entrance_refusal
from router.proxy.isolation import Apart, Isolation
from router.proxy.prefill_request import SPLIT_PATHS, splittable
from router.proxy.request_head import RequestHead
from router.proxy.router_error import BODY_CROWDED, CACHE_SHARED, MODEL_NOT_FOUND, NO_REPLICA, RouterError
from router.proxy.service import Service
from router.proxy.settings import ProxySettings
from router.proxy.tenant_request import take_in, without_salt
from router.routing.decision import Decision, NoReplica
from router.routing.flat_request import whole_request
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.prompt_blocks import UNREADABLE, Prompt, read_prompt, text_prompt

logger = logging.getLogger("warmroute.proxy")

LONG_BYTES: Final = 256 * 1024
"""Receiving, reading and sending on as much takes a millisecond; a megabyte in one turn would be four."""
_WHOLE: Final[Parser] = whole_request


class Submission:
    """One request. ``submit`` ends in ``begin`` or ``refuse``, at once or later from the running loop."""

    __slots__ = (
        "admission",
        "asked",
        "body",
        "error_code",
        "head",
        "isolation",
        "over",
        "prompt",
        "request_id",
        "salt_bytes",
        "service",
        "settings",
        "started_at",
        "waiting",
    )

    def __init__(
        self, service: Service, head: RequestHead, body: bytes, request_id: bytes, admission: Admission | None
    ) -> None:
        self.service = service
        self.settings: ProxySettings = service.settings
        self.head = head
        self.body = body
        """Empty once nobody needs it any more."""
        self.request_id = request_id
        self.admission = admission
        """Set where tenants are told apart."""
        self.salt_bytes = 0
        """Of the body's end: the tenant's cache salt."""
        self.prompt: Prompt = UNREADABLE
        self.asked: frozenset[int] | None = None
        """The replicas that alone may be chosen, if somebody says so."""
        self.isolation: Isolation | None = None
        """Set once it is known to have a prompt that must be kept apart from other tenants'."""
        self.started_at = 0.0
        """When it was complete."""
        self.waiting: Held | None = None
        """Set while the request waits in the router for its replica."""
        self.error_code = ""
        """Of the router's own error that the client got, or that broke its answer off."""
        self.over = False
        service.counters.in_flight += 1

    # --- its prompt ------------------------------------------------------------------------------

    def submit(self) -> None:
        """It is complete: read the prompt, then ask the fleet.

        A long body, or one that seems to have very many values, is read in turns of the loop of its own.
        """
        service, body = self.service, self.body
        now = self.started_at = service.clock()
        service.budget.earn()
        if len(body) >= CHECK_FROM_BYTES:
            service.writes.flush()  # nobody else's need wait for this
            if promises_many(body):
                self._next_turn(self._submit_crowded)
                return
            if len(body) >= LONG_BYTES:
                self._next_turn(self._read_long, _WHOLE)
                return
        prompt = self._read(_WHOLE)
        if prompt is not None:
            self._choose(prompt, now)

    def _submit_crowded(self) -> None:
        total = marks_of(self.body)
        if total is None:
            self.refuse(BODY_CROWDED)
        else:
            self._next_turn(self._crowd_counted, total)

    def _crowd_counted(self, total: int) -> None:
        self._next_turn(self._read_long, parser_for(self.body, total))

    def _read_long(self, parse: Parser) -> None:
        prompt = self._read(parse)
        if prompt is not None:
            self._next_turn(self._prompt_read, prompt)

    def _next_turn(self, step: Callable[..., None], *what: object) -> None:
        """Others have their turns between two steps."""
        asyncio.get_running_loop().call_soon(self._turn, step, what)

    def _turn(self, step: Callable[..., None], what: tuple[object, ...]) -> None:
        if self.over:
            return
        try:
            step(*what)
        except Exception:
            logger.exception("a fault of the router's own")
            self.failed_inside()

    def _read(self, parse: Parser) -> Prompt | None:
        """The prompt; ``None``: the request was refused, or ``_prompt_read`` gets the prompt."""
        reader, admission, body = self.service.prompt_reader, self.admission, self.body
        request = None
        if admission is not None:
            taken = take_in(admission.caller, self.head, body, parse)
            if isinstance(taken, RouterError):
                self.refuse(taken)
                return None
            self.body, request, self.salt_bytes = taken
            self.isolation = self.settings.isolation if body else None
            if request is None:
                return Prompt(keys=(), units=0)
        elif body[:1] != b"{" and body[:64].lstrip()[:1] != b"{":
            return UNREADABLE
        if reader is not None:
            reader.read(self.body, self._read_by_token, parse, request)
            return None
        if request is None:
            if parse is _WHOLE:
                return read_prompt(body)
            request = parse(body)
        return UNREADABLE if request is None else text_prompt(request)

    def _read_by_token(self, prompt: Prompt) -> None:
        """The reader has it, at once or in a turn of its own, where nobody else catches a fault of ours."""
        self._turn(self._prompt_read, (prompt,))

    def _prompt_read(self, prompt: Prompt) -> None:
        """The prompt is there, at once or after a while."""
        if not self.over:
            self._choose(prompt, self.service.clock())

    # --- before the fleet ------------------------------------------------------------------------

    def _choose(self, prompt: Prompt, now: float) -> None:
        service, admission, head, body = self.service, self.admission, self.head, self.body
        if admission is not None:
            admission.caller.owned(prompt)
        self.prompt = prompt
        refusal = entrance_refusal(service, self.settings, head, prompt, body, admission, now)
        if refusal is not None:
            self.refuse(refusal)
            return
        fleet = service.fleet
        try:
            outcome = fleet.submit(
                prompt,
                now,
                session=head.session,
                policy=head.policy,
                context=self,
                within=self.within,
                two_steps=self.may_split and _asks(head) and splittable(body),
            )
        except NoReplica as error:
            self.refuse(MODEL_NOT_FOUND if error.why == "unknown_model" else self._nobody())
            return
        service.counters.decision_s.add(service.clock() - self.started_at)
        if admission is not None:
            reply_tokens = int(fleet.traffic.expected_output_tokens(prompt.max_tokens))
            admission.began(fleet.caches.prompt_tokens(prompt), reply_tokens, now)
        if isinstance(outcome, Held):
            self.waiting = outcome
            if admission is not None:
                admission.held(True)
            service.hold_began()
            self.hold_began()
        else:
            self.begin(outcome, now)
        if fleet.outbox:
            service.send_released(now)

    def hold_ended(self, flight: InFlight | None, now: float) -> None:
        """The request waited in the router until now; without a ``flight`` no replica is left for it."""
        self.waiting = None
        if self.admission is not None:
            self.admission.held(False)
        if flight is not None and (within := self.within) is not None and flight.replica.index not in within:
            self.service.fleet.cancelled(flight, now)  # meanwhile it was found to keep no tenants apart
            flight = None
        if flight is None:
            self.refuse(self._nobody())
        else:
            self.begin(flight, now)

    @property
    def within(self) -> Collection[int] | None:
        """The replicas that alone may get it now, by index; ``None``: any."""
        isolation = self.isolation
        return self.asked if isolation is None else isolation.within(self.head.path, self.asked)

    def decide_again(self, now: float, tried: Collection[int]) -> Decision:
        """Where it may go after the replicas ``tried``. Raises ``NoReplica``."""
        head = self.head
        return self.service.fleet.decide(
            self.prompt, now, tried=tried, session=head.session, policy=head.policy, within=self.within
        )

    def _nobody(self) -> RouterError:
        """Why no replica may take it."""
        within = self.within
        shared = isinstance(within, Apart) and within.sharing_serve(self.prompt.model)
        return CACHE_SHARED if shared else NO_REPLICA

    # --- its ends --------------------------------------------------------------------------------

    @property
    def plain_body(self) -> bytes:
        """The body without the tenant's cache salt."""
        return without_salt(self.body, self.salt_bytes)

    def answered(self, booked: Booked, usage: Usage | None, ttft_s: float | None, now: float) -> None:
        """The whole answer was passed on, with ``usage`` in it: the fleet learns from it, it is counted and
        written down. The caller sends what is released by it."""
        booked.finished(now, usage)
        service, admission = self.service, self.admission
        if ttft_s is None and self.prompt.stream:
            service.counters.tokenless_streams += 1
        if usage is not None:
            service.count_usage(usage)
            if admission is not None:
                admission.used(usage, now)
        if service.request_log is not None:
            matched = booked.decision.matched_tokens
            service.request_log.answered(
                self.head, self.plain_body, self.prompt, booked.name, matched, usage, ttft_s
            )

    def stop_waiting(self, now: float) -> None:
        """Nobody wants it any more: its place in the router is free."""
        waiting, self.waiting = self.waiting, None
        if waiting is not None:
            self.service.drop_waiting(waiting, now)

    def count_refusal(self, error: RouterError) -> None:
        """The client gets the router's own error."""
        self.error_code = error.code
        self.service.count_error(error)
        if self.admission is not None:
            self.admission.caller.counters.turned(error.code)

    def settle(self, status: int, *, answered: bool) -> None:
        """The request is over, exactly once. ``status``: what the client got."""
        assert not self.over
        self.over = True
        service = self.service
        if self.admission is not None:
            self.admission.ended(status, service.clock(), answered=answered)
        service.counters.in_flight -= 1

    # --- who carries it --------------------------------------------------------------------------

    @property
    def may_split(self) -> bool:
        """Whoever carries it can have the prompt computed on one replica and the answer on another."""
        raise NotImplementedError

    def hold_began(self) -> None:
        """The request waits in the router."""

    def begin(self, flight: InFlight, now: float) -> None:
        """The fleet has booked the request on a replica."""
        raise NotImplementedError

    def refuse(self, error: RouterError) -> None:
        """The client gets the router's own error."""
        raise NotImplementedError

    def failed_inside(self) -> None:
        """A fault of the router's own was raised while it worked on this request."""
        raise NotImplementedError


def _asks(head: RequestHead) -> bool:
    """Whether it is a request for a completion."""
    return head.method == b"POST" and head.path in SPLIT_PATHS
