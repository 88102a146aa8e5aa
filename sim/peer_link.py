"""Several routers that tell one another what they sent: the same bookings in every ledger, a little late.

Every dispatch, first token and end of one router is repeated in the others' fleets after ``lag_s``: the work
is booked in the replica's ledger, the prompt enters the index, the arrival enters the traffic's averages, and
what a replica was seen to do enters its calibration (a router that sees only its own requests takes the time
a replica spends on others' for slowness).

This stands in for the shared state of real routers (Redis streams, issue 7) until ``Fleet`` has an event for
what peers report; it then belongs behind that event. It uses what the fleet makes public and changes nothing
else.
"""

from collections.abc import Sequence

from router.routing.fleet import Fleet
from router.routing.in_flight import InFlight
from router.routing.ledger import Booking
from router.routing.replica_state import ReplicaState
from sim.event_queue import EventQueue


class PeerLink:
    """Connects ``fleets``, one per router, of the same replicas in the same order."""

    __slots__ = ("_booked", "_fleets", "_lag_s", "_queue")

    def __init__(self, queue: EventQueue, lag_s: float) -> None:
        """``lag_s``: from an event at one router until the others know; 0 is one ledger for all."""
        self._queue = queue
        self._lag_s = lag_s
        self._fleets: Sequence[Fleet] = ()
        self._booked: dict[InFlight, list[tuple[ReplicaState, Booking]]] = {}

    def connect(self, fleets: Sequence[Fleet]) -> None:
        """These fleets tell one another."""
        self._fleets = fleets

    def sent(self, origin: Fleet, flight: InFlight, now: float) -> None:
        """``origin`` sent a request."""
        if self._lag_s:
            self._queue.at(now + self._lag_s, self._repeat_sent, origin, flight)
        else:
            self._repeat_sent(origin, flight)

    def first_token(self, flight: InFlight, now: float) -> None:
        """Its first token came."""
        if self._lag_s:
            self._queue.at(now + self._lag_s, self._repeat_first_token, flight)
        else:
            self._repeat_first_token(flight)

    def over(self, flight: InFlight, now: float) -> None:
        """It ended."""
        if self._lag_s:
            self._queue.at(now + self._lag_s, self._repeat_over, flight)
        else:
            self._repeat_over(flight)

    def _repeat_sent(self, origin: Fleet, flight: InFlight) -> None:
        now, booking, index = self._queue.now, flight.booking, flight.replica.index
        booked = self._booked[flight] = []
        for fleet in self._fleets:
            if fleet is origin:
                continue
            replica = fleet.replicas[index]
            if replica.ledger.queued == 0:
                replica.cost.prefill_started(now)
            theirs = replica.ledger.book(
                flight.decision.prefill_s, booking.new_tokens, booking.expected_output_tokens, now
            )
            booked.append((replica, theirs))
            if flight.prompt.keys:
                fleet.index.insert(index, flight.prompt.keys)
            fleet.traffic.arrived(now, flight.decision.prefill_s + flight.decision.saved_s)

    def _repeat_first_token(self, flight: InFlight) -> None:
        now, matched = self._queue.now, flight.decision.matched_tokens
        for replica, booking in self._booked[flight]:
            replica.ledger.first_token(booking, now)
            replica.cost.prefill_finished(now, booking.new_tokens, matched, replica.ledger.queued)

    def _repeat_over(self, flight: InFlight) -> None:
        now = self._queue.now
        for replica, booking in self._booked.pop(flight):
            was_queued = booking.state == Booking.QUEUED
            replica.ledger.release(booking, now)
            if was_queued:
                replica.cost.prefill_abandoned(now, replica.ledger.queued)
