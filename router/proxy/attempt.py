"""One try of a request on one replica: its booking in the fleet and its connection, each given back once."""

import asyncio
from typing import TYPE_CHECKING

from router.proxy.replica_connection import ReplicaConnection
from router.proxy.service import Service
from router.routing.in_flight import InFlight, Usage
from router.routing.retry import Failure

if TYPE_CHECKING:
    from router.proxy.exchange import Exchange


class Attempt:
    """One try. However it ends, exactly one of the fleet's events for that is raised."""

    __slots__ = (
        "_connecting",
        "_exchange",
        "_flight",
        "_service",
        "connection",
        "decision",
        "name",
        "sent_at",
    )

    def __init__(self, service: Service, exchange: "Exchange", flight: InFlight, now: float) -> None:
        self._service = service
        self._exchange = exchange
        self._flight: InFlight | None = flight
        """The booking, until it is over."""
        self.decision = flight.decision
        self.name = flight.replica.name
        self.connection: ReplicaConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.sent_at = now
        """When the connection was there; until then, when it was asked for."""

    # --- sending ---------------------------------------------------------------------------------

    def send(self, now: float) -> None:
        """Send the request on an idle connection, or on one that is made now."""
        assert self._flight is not None
        pool = self._service.pool(self._flight.replica)
        connection = pool.take_idle(now - self._exchange.settings.replica_keepalive_s)
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
        exchange = self._exchange
        connection.send(exchange, *exchange.request(connection.pool))

    def connected(self, connection: ReplicaConnection) -> None:
        """The pool made a connection."""
        self._connecting = None
        if self._flight is None:
            connection.abort()
            return
        self.sent_at = self._service.clock()
        self._send_on(connection)

    def connect_failed(self, why: str) -> None:
        """The pool could make none."""
        self._connecting = None
        if self._flight is not None:
            self._exchange.connect_failed(why)

    # --- ends of the booking ---------------------------------------------------------------------

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
        """By nobody's fault; the replica is to stop."""
        flight, self._flight = self._flight, None
        if flight is not None:
            self._service.fleet.cancelled(flight, now)
            self._service.send_released(now)
        self.drop()

    @property
    def unreachable(self) -> bool:
        """The replica was ejected because it answers nobody."""
        return self._flight is not None and self._flight.replica.health.unreachable

    @property
    def lost(self) -> bool:
        """The replica answers nobody and was removed: it is not expected back."""
        return self.unreachable and self._flight is not None and self._flight.replica.leaving

    @property
    def booked(self) -> bool:
        """The booking is not over."""
        return self._flight is not None

    # --- the connection --------------------------------------------------------------------------

    @property
    def waits_for_answer(self) -> bool:
        """The request was sent."""
        return self.connection is not None

    def drop(self) -> None:
        """Break the connection, or stop making one."""
        connection, self.connection = self.connection, None
        if connection is not None:
            connection.abort()
        task, self._connecting = self._connecting, None
        if task is not None:
            task.cancel()

    def give_back(self, now: float, *, reusable: bool) -> None:
        """The answer is complete: the connection is for others."""
        connection, self.connection = self.connection, None
        if connection is not None:
            if reusable:
                connection.release(now)
            else:
                connection.close()
