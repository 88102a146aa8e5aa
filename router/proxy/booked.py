"""A request's booking on one replica: what becomes of it there, told to the fleet; its end exactly once."""

from router.proxy.service import Service
from router.routing.in_flight import InFlight, Usage
from router.routing.retry import Failure


class Booked:
    """Of its ends the first that is told counts: exactly one of the fleet's events for that is raised."""

    __slots__ = ("_flight", "_service", "decision", "name")

    def __init__(self, service: Service, flight: InFlight) -> None:
        self._service = service
        self._flight: InFlight | None = flight
        """The booking, until it is over."""
        self.decision = flight.decision
        self.name = flight.replica.name

    @property
    def booked(self) -> bool:
        """The booking is not over."""
        return self._flight is not None

    def first_token(self, now: float) -> None:
        """The first event with content came."""
        if self._flight is not None:
            self._service.fleet.first_token(self._flight, now)
            self._service.send_released(now)

    def progressed(self, now: float) -> None:
        """More of the answer came lately."""
        if self._flight is not None:
            self._service.fleet.progressed(self._flight, now)

    def finished(self, now: float, usage: Usage | None) -> None:
        """The answer was passed on whole. The caller sends what is released by it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.finished(flight, now, usage)

    def failed(self, now: float, failure: Failure) -> None:
        """By the replica's fault."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.failed(flight, now, failure)
            self._service.send_released(now)

    def refused(self, now: float) -> None:
        """By the client's fault: 4xx."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.refused(flight, now)
            self._service.send_released(now)

    def cancelled(self, now: float) -> None:
        """By nobody's fault."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.cancelled(flight, now)
            self._service.send_released(now)
