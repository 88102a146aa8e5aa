"""One try of a request on one replica: its booking in the fleet and its connection, each given back once."""

import asyncio

from router.proxy.asker import Asker
from router.proxy.booked import Booked
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.service import Service
from router.routing.in_flight import InFlight


class Attempt(Booked):
    """One try."""

    __slots__ = ("_asker", "_connecting", "connection", "sent_at")

    def __init__(
        self,
        service: Service,
        asker: Asker,
        flight: InFlight,
        now: float,
        beside: Booked | None = None,
    ) -> None:
        """``beside``: see ``Booked``."""
        super().__init__(service, flight, beside)
        self._asker: Asker | None = asker
        """Until the connection is given back: it refers to this."""
        self.connection: ReplicaConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.sent_at = now
        """When the connection was there; until then, when it was asked for."""

    # --- sending ---------------------------------------------------------------------------------

    def send(self, now: float) -> None:
        """Send the request on an idle connection, or on one that is made now."""
        assert self._flight is not None and self._asker is not None
        pool = self._service.pool(self._flight.replica)
        connection = pool.take_idle(now - self._asker.settings.replica_keepalive_s)
        if connection is not None:
            self._send_on(connection)
        else:
            self._connecting = pool.connect(self)

    def send_again(self) -> None:
        """The replica had closed an idle connection when the request came: use a fresh one."""
        assert self._flight is not None
        self.connection = None
        self.sent_at = self._service.clock()
        pool = self._service.pool(self._flight.replica)
        self._connecting = pool.connect(self)

    def _send_on(self, connection: ReplicaConnection) -> None:
        self.connection = connection
        asker = self._asker
        assert asker is not None
        first, rest = asker.request(connection.pool)
        connection.send(asker, first, rest)

    def connected(self, connection: ReplicaConnection) -> None:
        """The pool made a connection."""
        self._connecting = None
        if self._flight is None:
            connection.abort()
            return
        self.sent_at = self._service.clock()
        self._send_on(connection)

    def connect_failed(self, why: str, *, own: bool) -> None:
        """The pool could make none. ``own``: because this process had no socket for it."""
        self._connecting = None
        if self._flight is not None and self._asker is not None:
            self._asker.connect_failed(why, own=own)

    # --- ends of the booking ---------------------------------------------------------------------

    def cancelled(self, now: float) -> None:
        """By nobody's fault; the replica is to stop."""
        super().cancelled(now)
        self.drop()

    @property
    def unreachable(self) -> bool:
        """The replica was ejected because it answers nobody."""
        return self._flight is not None and self._flight.replica.health.unreachable

    @property
    def lost(self) -> bool:
        """The replica answers nobody and was removed: it is not expected back."""
        return self.unreachable and self._flight is not None and self._flight.replica.leaving

    # --- the connection --------------------------------------------------------------------------

    @property
    def waits_for_answer(self) -> bool:
        """The request was sent."""
        return self.connection is not None

    def drop(self) -> None:
        """Break the connection, or stop making one."""
        connection, self.connection, self._asker = self.connection, None, None
        if connection is not None:
            connection.abort()
        task, self._connecting = self._connecting, None
        if task is not None:
            task.cancel()

    def give_back(self, now: float, *, reusable: bool) -> None:
        """The answer is complete: the connection is for others."""
        connection, self.connection, self._asker = self.connection, None, None
        if connection is not None:
            if reusable:
                connection.release(now)
            else:
                connection.close()
