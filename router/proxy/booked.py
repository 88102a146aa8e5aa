"""A request's booking on one replica: what becomes of it there, told to the fleet; its end exactly once."""

from collections.abc import Collection

from router.proxy.service import Service
from router.routing.decision import NoReplica
from router.routing.in_flight import InFlight, Usage
from router.routing.prompt_blocks import Prompt
from router.routing.retry import Failure


class Booked:
    """Of its ends the first that is told counts: exactly one of the fleet's events for that is raised."""

    __slots__ = ("_beside", "_flight", "_service", "decision", "name")

    def __init__(self, service: Service, flight: InFlight, beside: "Booked | None" = None) -> None:
        """``beside``: the booking of the prompt on a replica that computes it for this one."""
        self._service = service
        self._flight: InFlight | None = flight
        """The booking, until it is over."""
        self._beside = beside
        self.decision = flight.decision
        self.name = flight.replica.name

    @property
    def booked(self) -> bool:
        """The booking is not over."""
        return self._flight is not None

    def first_token(self, now: float) -> None:
        """The first event with content came."""
        self._computed(now)
        if self._flight is not None:
            self._service.fleet.first_token(self._flight, now)
            self._service.send_released(now)

    def progressed(self, now: float) -> None:
        """More of the answer came lately."""
        if self._flight is not None:
            self._service.fleet.progressed(self._flight, now)

    def still_waits(self, now: float) -> None:
        """There is no byte of content yet."""
        flight = self._flight
        if flight is not None and self._service.fleet.still_waits(flight, now):
            self._service.found_silent(flight, now)

    def finished(self, now: float, usage: Usage | None) -> None:
        """The answer was passed on whole. The caller sends what is released by it."""
        self._computed(now)
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.finished(flight, now, usage)

    def failed(self, now: float, failure: Failure, rest_s: float = 0.0) -> None:
        """By the replica's fault. ``rest_s``: see ``Fleet.failed``."""
        self._not_computed(now)
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.failed(flight, now, failure, rest_s)
            self._service.send_released(now)

    def refused(self, now: float) -> None:
        """By the client's fault: 4xx."""
        self._not_computed(now)
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.refused(flight, now)
            self._service.send_released(now)

    def cancelled(self, now: float) -> None:
        """By nobody's fault."""
        self._not_computed(now)
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.cancelled(flight, now)
            self._service.send_released(now)

    def _computed(self, now: float) -> None:
        """The prompt was computed beside."""
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.finished(now, None)
            self._service.send_released(now)

    def _not_computed(self, now: float) -> None:
        """Whether it was cannot be told."""
        beside, self._beside = self._beside, None
        if beside is not None:
            beside.cancelled(now)


def booked_beside(
    service: Service,
    prompt: Prompt,
    first: InFlight,
    now: float,
    session: str | None,
    policy: str | None,
    within: Collection[int] | None,
) -> tuple[InFlight, Booked]:
    """``first`` books the prompt on a replica that a sidecar will ask: who answers, and that booking beside
    it.

    Raises ``NoReplica``, with nothing booked, when nobody is left to answer.
    """
    fleet = service.fleet
    try:
        decision = fleet.decide_answerer(
            prompt, now, first.replica, session=session, policy=policy, within=within
        )
    except NoReplica:
        fleet.cancelled(first, now)
        raise
    flight = fleet.sent(prompt, decision, now)
    fleet.prefilled_elsewhere(flight, now)
    service.counters.handoffs += 1
    return flight, Booked(service, first)
