"""Several routers that tell one another what happens, a little late, through the routers' own journals.

Redis and the network between (``router/state``) are replaced by a delay; what is told, and what the others
make of it (``router/routing/peers.py``), is the real routers' code.
"""

from collections.abc import Callable, Sequence

from router.routing.fleet import Fleet
from router.routing.journal import Journal
from router.routing.peer_events import PeerEvent
from sim.event_queue import EventQueue


class PeerLink:
    """Connects ``fleets``, one per router, of the same replicas."""

    __slots__ = ("_fleets", "_lag_s", "_queue", "heard")

    def __init__(self, queue: EventQueue, lag_s: float, fleets: Sequence[Fleet]) -> None:
        """``lag_s``: from an event at one router until the others know."""
        self._queue = queue
        self._lag_s = lag_s
        self._fleets = fleets
        self.heard: Callable[[], None] = lambda: None
        """Called when some router heard of others: it may have let go what it held."""
        for number, fleet in enumerate(fleets):
            fleet.journal = Journal(f"router-{number}", fleet.caches.exact)
            fleet.journal.wake = self._news_of(fleet, fleet.journal)

    def _news_of(self, fleet: Fleet, journal: Journal) -> Callable[[], None]:
        def tell() -> None:
            self._queue.at(
                self._queue.now + self._lag_s, self._deliver, fleet, journal.router, journal.take()
            )

        return lambda: self._queue.at(self._queue.now, tell)

    def _deliver(self, origin: Fleet, router: str, events: list[PeerEvent]) -> None:
        for fleet in self._fleets:
            if fleet is not origin:
                fleet.peers.told(router, events, self._queue.now)
        self.heard()
