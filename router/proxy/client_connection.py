"""One client's connection: its requests are served one at a time, in order, and its answers written.

Reading goes on while a request is served, into a small buffer, so that a client's leaving is noticed at
once and not at the next write.
"""

import asyncio
import logging
import socket
import struct
from enum import Enum, auto
from typing import TYPE_CHECKING, Final, cast

from router.proxy.exchange import Exchange
from router.proxy.forwarding import Forwarding
from router.proxy.own_routes import own_answer
from router.proxy.request_head import ClientError, RequestHead
from router.proxy.request_reader import Expecting, RequestReader
from router.proxy.router_error import (
    RECEIVING_SHARE,
    REQUEST_TIMEOUT,
    TOO_MANY_CONNECTIONS,
    TOO_MUCH_RECEIVED,
    RouterError,
    error_answer,
)
from router.proxy.service import Service
from router.proxy.settings import ProxySettings
from router.proxy.tenancy import Caller
from router.proxy.turn_writes import LateWriter

if TYPE_CHECKING:
    from router.proxy.data_plane import DataPlane

logger = logging.getLogger("warmroute.proxy")

AHEAD_BYTES: Final = 64 * 1024
"""Read ahead of the request being served, at most (and one read more)."""
MOST_AT_ONCE: Final = 32
"""Pipelined requests that are begun before others get their turn."""
WRITE_HIGH_BYTES: Final = 64 * 1024
LINGER_S: Final = 5.0
"""After a refusal the rest of the request is read and thrown away for so long: closing on unread bytes
would reset the connection and take the refusal with it."""
_TCP_OVER = (7, 8)
"""tcp_info.tcpi_state on Linux: CLOSE (after a reset), CLOSE_WAIT (the peer has sent its FIN)."""
_RESET_ON_CLOSE = struct.pack("ii", 1, 0)


class Phase(Enum):
    """What the connection is doing."""

    READING = auto()
    """A request, or waiting for one."""
    SERVING = auto()
    LINGERING = auto()
    """Refused; what still comes is thrown away."""
    CLOSING = auto()


class ClientConnection(LateWriter):
    """One client's connection."""

    __slots__ = (
        "_arriving",
        "_forwarding",
        "_phase",
        "_plane",
        "_pumping",
        "_reader",
        "_reading_paused",
        "_receiving",
        "_service",
        "_since",
        "_turn_waits",
        "_unwritten",
        "_unwritten_since",
        "exchange",
        "keep_alive",
        "write_paused",
    )

    def __init__(self, plane: "DataPlane") -> None:
        super().__init__(plane.service.writes)
        self._plane = plane
        self._service: Service = plane.service
        self.exchange: Exchange | None = None
        """The request being served by a replica."""
        self.keep_alive = True
        """The connection stays open after the answer to the current request."""
        self.write_paused = False
        self._phase = Phase.READING
        self._reader = RequestReader(plane.last_head)
        self._pumping = False
        self._reading_paused = False
        self._turn_waits = False
        self._receiving = 0
        """Bytes of a body that is not whole yet, as counted for the whole router."""
        self._arriving: Caller | None = None
        """Whose such a body is, where tenants are told apart; it is counted as the tenant's."""
        self._since: float | None = None
        """When the client last did what it is waited for; the first sweep after that sets it."""
        self._unwritten = 0
        self._unwritten_since = 0.0
        self._forwarding: Forwarding | None = None
        """Kept while heads and settings stay the same."""

    @property
    def unserved(self) -> bool:
        """No request has come yet."""
        return self._forwarding is None and self._phase is Phase.READING

    # --- from the transport ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self.transport.set_write_buffer_limits(WRITE_HIGH_BYTES)
        if not self._plane.client_opened(self):
            self._refuse(TOO_MANY_CONNECTIONS.at(self._service.settings.client_connections))

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if phase is Phase.READING:
            reader = self._reader
            reader.feed(data)
            if reader.expecting is not Expecting.HEAD:
                self._since = None
            self._pump()
        elif phase is Phase.SERVING:
            reader = self._reader
            reader.feed(data)
            if len(reader.buffer) > AHEAD_BYTES:
                self._read_or_wait()

    def eof_received(self) -> None:
        self.flush()  # before the transport closes
        self._gone()

    def connection_lost(self, exc: Exception | None) -> None:
        self.drop_unsent()
        self._gone()
        self._arrived()
        self._plane.client_lost(self)

    def pause_writing(self) -> None:
        self.write_paused = True
        if self.exchange is not None:
            self.exchange.client_paused()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self.exchange is not None:
            self.exchange.client_resumed()
        elif self._phase is Phase.READING:
            self._pump()

    def _gone(self) -> None:
        """The client left, or half of it: one that sends nothing more is not waited for."""
        self._phase = Phase.CLOSING
        if self.exchange is not None:
            self.exchange.client_gone()

    # --- requests --------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Serve what has been read, one request after the other, until one has to wait."""
        if self._pumping:
            return
        self._pumping = True
        reader = self._reader
        settings = self._service.settings
        begun = 0
        try:
            while reader.buffer and self._phase is Phase.READING and not self.write_paused:
                if begun == MOST_AT_ONCE:
                    self._turn_over()
                    break
                begun += 1
                request = reader.next_request(
                    header_limit=settings.header_bytes, body_limit=settings.body_bytes
                )
                if request is None:
                    if reader.expecting is Expecting.BODY:
                        self._since = None
                        self._check_key(reader.head)
                        self._count_receiving(reader.receiving, settings.receiving_bytes)
                    if reader.wants_continue:
                        reader.wants_continue = False
                        self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                    if reader.turn_over:
                        self._turn_over()
                    break
                head, body = request
                if self._receiving or self._arriving is not None:
                    self._arrived()
                self._serve(head, body)
        except ClientError as error:
            self._refuse(error.error)
        except Exception:
            logger.exception("a fault of the router's own")
            if self.exchange is not None:
                self.exchange.failed_inside()
            else:
                self._abort()
        finally:
            self._pumping = False
        if self._reading_paused or len(reader.buffer) > AHEAD_BYTES:
            self._read_or_wait()

    def _turn_over(self) -> None:
        """There is more to read in what came; others first."""
        if not self._turn_waits:
            self._turn_waits = True
            asyncio.get_running_loop().call_soon(self._next_turn)

    def _next_turn(self) -> None:
        self._turn_waits = False
        if self._phase is Phase.READING:
            self._pump()

    def _read_or_wait(self) -> None:
        """Take no more from the client while enough is here that cannot be served yet."""
        phase = self._phase
        stuck = phase is Phase.SERVING or (phase is Phase.READING and (self.write_paused or self._turn_waits))
        wait = stuck and len(self._reader.buffer) > AHEAD_BYTES
        if wait is not self._reading_paused and not self.transport.is_closing():
            self._reading_paused = wait
            if wait:
                self.transport.pause_reading()
            else:
                self.transport.resume_reading()

    def _count_receiving(self, unfinished: int, limit: int) -> None:
        """An unfinished body has so many bytes. Raises ``ClientError`` over the ``limit`` of all clients."""
        counters, arriving = self._service.counters, self._arriving
        more = unfinished - self._receiving
        self._receiving = unfinished
        counters.receiving_bytes += more
        if arriving is not None:
            arriving.quota.arriving_bytes += more
        if not unfinished:
            return
        room = limit - counters.receiving_bytes
        if room < 0:
            raise ClientError(TOO_MUCH_RECEIVED.at(limit))
        if arriving is not None and not arriving.may_receive(room):
            self._turned_away(arriving, RECEIVING_SHARE)

    def _arrived(self) -> None:
        """The body is whole, or none is expected any more."""
        self._count_receiving(0, 0)
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            arriving.quota.arriving -= 1

    def _turned_away(self, caller: Caller, error: RouterError) -> None:
        caller.counters.turned(error.code)
        caller.counters.count(error.status)
        raise ClientError(error)

    def _serve(self, head: RequestHead, body: bytes) -> None:
        service = self._service
        self.keep_alive = head.keep_alive and not service.shutting_down
        request_id = head.request_id or service.new_request_id()
        forwarding = self._forwarding
        if forwarding is None or forwarding.head is not head or forwarding.settings is not service.settings:
            forwarding = self._forward(head)
        if forwarding.refusal is not None:
            self._turn_away(forwarding.refusal, request_id.decode(), head)
        elif forwarding.preflight and service.settings.cors is not None:
            service.count_request("", 204)
            self.write(service.settings.cors.preflight(head, request_id, keep_alive=self.keep_alive))
            self._answered()
        elif forwarding.routed:
            self._phase = Phase.SERVING
            trace = None if service.tracing is None else service.tracing.begin(head)
            exchange = self.exchange = Exchange(service, self, head, body, request_id, forwarding, trace)
            exchange.submit()
        else:
            self.write(
                own_answer(
                    service,
                    head,
                    request_id,
                    forwarding.caller,
                    keep_alive=self.keep_alive,
                    cors=forwarding.cors_lines,
                )
            )
            self._answered()

    @property
    def _cors_lines(self) -> bytes:
        """Header lines of an answer to the request whose head was read last."""
        return b"" if self._forwarding is None else self._forwarding.cors_lines

    def _forward(self, head: RequestHead) -> Forwarding:
        self._forwarding = self._plane.last_forwarding.of(head, self._service.settings, self.transport)
        return self._forwarding

    def _check_key(self, head: RequestHead) -> None:
        """Whoever may not use the router, or not now, need not send a whole body to learn it.

        Raises ``ClientError``.
        """
        settings, forwarding = self._service.settings, self._forwarding
        if not settings.keys and settings.tenancy is None:
            return
        if forwarding is None or forwarding.head is not head or forwarding.settings is not settings:
            forwarding = self._forward(head)
        if forwarding.refusal is not None:
            raise ClientError(forwarding.refusal)
        caller = forwarding.caller
        if caller is not None and self._arriving is None:
            refusal = caller.arrival_refusal()
            if refusal is not None:
                self._turned_away(caller, refusal)
            caller.quota.arriving += 1
            self._arriving = caller

    def _turn_away(self, error: RouterError, request_id: str, head: RequestHead) -> None:
        """The whole request came, and is not served."""
        service = self._service
        service.count_error(error)
        service.count_request("", error.status)
        head_only = head.method == b"HEAD"
        self.write(
            error_answer(
                error,
                request_id,
                keep_alive=self.keep_alive,
                head_only=head_only,
                cors=self._cors_lines,
            )
        )
        self._answered()

    # --- from the exchange -----------------------------------------------------------------------

    def answered(self) -> None:
        """The exchange wrote the whole answer: the next request may be served."""
        self._answered()
        if self._phase is Phase.READING and self._reader.buffer:
            self._pump()

    def _answered(self) -> None:
        self._since = None
        if self._phase is Phase.CLOSING:
            return
        if self.keep_alive:
            self._phase = Phase.READING
        else:
            self._close()

    def refused(self, error: RouterError, request_id: str, *, head_only: bool, detail: str) -> None:
        """The exchange ended without an answer; the client gets ``error``."""
        if self._phase is Phase.SERVING:
            self.write(
                error_answer(
                    error,
                    request_id,
                    keep_alive=self.keep_alive,
                    head_only=head_only,
                    detail=detail,
                    cors=self._cors_lines,
                )
            )
            self.answered()

    def broken_off(self, last: bytes, *, reset: bool) -> None:
        """The exchange's answer stays incomplete: write ``last`` and break the transfer.

        Where only the close says that a body is complete (``reset``), the close must be a reset.
        """
        if self._phase is not Phase.SERVING:
            return
        if last:
            self.write(last)
        self.flush()
        connection = self.transport.get_extra_info("socket") if reset else None
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        self._close()

    # --- ends and limits -------------------------------------------------------------------------

    def _refuse(self, error: RouterError) -> None:
        """What came is not a request that can be served; nothing after it can be trusted."""
        service = self._service
        self._arrived()
        service.count_error(error)
        service.count_request("", error.status)
        request_id = service.new_request_id().decode()
        self.write(error_answer(error, request_id, keep_alive=False, cors=self._cors_lines))
        self._phase = Phase.LINGERING
        self._since = None
        self.flush()
        if self.transport.can_write_eof():
            self.transport.write_eof()

    def _close(self) -> None:
        """Close once everything is written."""
        self._phase = Phase.CLOSING
        self.flush()
        self.transport.close()

    def shut_down(self, *, now: bool) -> None:
        """The router stops: close when the current request is over, or ``now``."""
        self.keep_alive = False
        exchange = self.exchange
        if exchange is None:
            self._close()
        elif now:
            exchange.shut_down()

    def abort(self) -> None:
        """Break the connection."""
        self._gone()
        self._abort()

    def _abort(self) -> None:
        self.drop_unsent()
        self.transport.abort()

    def sweep(self, now: float, settings: ProxySettings) -> None:
        """Look at the limits of this connection and of its request."""
        unwritten = self.transport.get_write_buffer_size()
        if unwritten and unwritten == self._unwritten:
            if now - self._unwritten_since > settings.client_stall_s:
                self.abort()
                return
        else:
            self._unwritten = unwritten
            self._unwritten_since = now
        if self.exchange is not None:
            if self._reading_paused and self._peer_left():
                self.abort()
            else:
                self.exchange.sweep(now)
            return
        if self._since is None:
            self._since = now
        waited = now - self._since
        if self._phase is Phase.LINGERING:
            if waited > LINGER_S:
                self._close()
        elif self._phase is Phase.READING and not self.write_paused:
            if self._reader.expecting is Expecting.REQUEST:
                if waited > settings.client_keepalive_s:
                    self._close()
            elif waited > settings.client_header_s:
                self._refuse(REQUEST_TIMEOUT.at(settings.client_header_s))

    def _peer_left(self) -> bool:
        """Whether the client closed, told without reading what it sent before that."""
        connection = self.transport.get_extra_info("socket")
        if connection is None or connection.family == socket.AF_UNIX or not hasattr(socket, "TCP_INFO"):
            return False
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 8)
        return info[0] in _TCP_OVER
