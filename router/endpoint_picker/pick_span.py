"""The OpenTelemetry span of one pick, where requests are traced: the same as a request of ``serve`` has."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from router.endpoint_picker.served_answer import ServedAnswer
from router.proxy.booked import Booked
from router.proxy.service import Service
from router.proxy.traced_request import Sent, traced

if TYPE_CHECKING:
    from router.endpoint_picker.pick import Pick
    from router.proxy.tracing import Trace


class PickSpan:
    """Owned by its pick. Does nothing where there is no tracing."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._trace: Trace | None = None
        self._held_s = 0.0
        self._tries = 0
        """That are known of."""

    @property
    def fields(self) -> Mapping[str, str] | None:
        """Trace context for the replica, in the place of the client's; ``None``: that passes as it is."""
        return None if self._trace is None else self._trace.fields

    def begin(self, pick: "Pick") -> None:
        """The request is complete."""
        if self._service.tracing is not None:
            self._trace = self._service.tracing.begin(pick.head)

    def picked(self, held_s: float) -> None:
        """It goes to a replica, ``held_s`` after it was complete."""
        self._held_s, self._tries = held_s, 1

    def served_by_another(self) -> None:
        """The one that was named first did not answer."""
        self._tries += 1

    def ended(self, pick: "Pick", booked: Booked | None, answer: ServedAnswer | None, status: int) -> None:
        """The request is over; ``status``: what the client got."""
        if self._trace is None:
            return
        sent = None if booked is None else Sent(booked.name, booked.decision, self._held_s, self._tries)
        self._trace.ended(traced(pick, status, sent, answer))
