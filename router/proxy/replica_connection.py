"""One connection to a replica: bytes -> the answer's head, then its body's bytes, told to whoever asked."""

import asyncio
from typing import TYPE_CHECKING, cast

from router.proxy.asker import Asker
from router.proxy.body_framing import FramingError
from router.proxy.response_head import GarbageError, ResponseHead
from router.proxy.turn_writes import LateWriter

if TYPE_CHECKING:
    from router.proxy.replica_pool import ReplicaPool

MAX_HEAD_BYTES = 64 * 1024


class ReplicaConnection(LateWriter):
    """One connection, serving one ``Asker`` at a time."""

    __slots__ = (
        "_body",
        "_buffer",
        "_clean_eof",
        "_held",
        "_made",
        "asker",
        "idle_since",
        "pool",
        "reused",
        "usable",
    )

    def __init__(self, pool: "ReplicaPool") -> None:
        super().__init__(pool.writes)
        self.pool = pool
        self.asker: Asker | None = None
        self.idle_since = 0.0
        self.reused = False
        """An answer came over it before; that it is closed now may be an old news."""
        self.usable = True
        self._body = False
        """The head of the answer is behind us."""
        self._held = False
        self._made = False
        self._buffer = b""
        self._clean_eof = False

    @property
    def ended_cleanly(self) -> bool:
        """The replica closed its side in good order."""
        return self._clean_eof

    # --- from the transport ----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._made = True
        self.pool.opened(self)
        if not self.usable:
            self.abort()

    def data_received(self, data: bytes) -> None:
        asker = self.asker
        if asker is None:
            self.close()  # nobody asked
        elif self._body:
            if self._held:
                self._buffer += data
                return
            try:
                asker.answer_continued(data)
            except FramingError:
                asker.replica_garbled()
        else:
            self._read_head(asker, data)

    def eof_received(self) -> None:
        self._clean_eof = True
        self.usable = False

    def connection_lost(self, exc: Exception | None) -> None:
        self.usable = False
        self.drop_unsent()
        self.pool.lost(self)
        asker = self.asker
        if asker is not None:
            self.asker = None
            asker.replica_lost(
                self, clean=exc is None and self._clean_eof, answered=self._body or bool(self._buffer)
            )

    # --- from who asks ------------------------------------------------------------------------

    def send(self, asker: Asker, first: bytes, rest: bytes) -> None:
        """Write the request, in two pieces (``Asker.request``); what comes back is told to ``asker``."""
        self.asker = asker
        self._body = False
        self.write(first)
        if rest:
            self.write(rest)

    def hold(self) -> None:
        """Stop here: the answer may or may not be wanted."""
        self._held = True
        self.transport.pause_reading()

    def let_go(self) -> bytes:
        """Go on after ``hold``; returns what came meanwhile."""
        self._held = False
        came, self._buffer = self._buffer, b""
        if not self.transport.is_closing():
            self.transport.resume_reading()
        return came

    def release(self, now: float) -> None:
        """The answer is complete and another request may follow."""
        if self.usable and not self._owes:
            self.asker = None
            self.reused = True
            self.pool.give_back(self, now)
        else:
            self.close()

    def close(self) -> None:
        """Close in good order, if the replica took all of the request: else it may never take the rest."""
        if self._owes:
            self.abort()  # it answered before it had the whole request
            return
        self.asker = None
        self.usable = False
        self.transport.close()

    @property
    def _owes(self) -> bool:
        """Some of the request was not sent yet."""
        return bool(self._unsent) or self.transport.get_write_buffer_size() > 0

    def abandon(self) -> None:
        """Nobody waits for this connection any more; it may not be made yet."""
        self.usable = False
        if self._made:
            self.abort()
            self.pool.lost(self)  # uvloop does not tell the loss of what it made for a cancelled task

    def abort(self) -> None:
        """Break the connection: the replica is to stop."""
        self.asker = None
        self.usable = False
        self.drop_unsent()
        self.transport.abort()

    # --- the head --------------------------------------------------------------------------------

    def _read_head(self, asker: Asker, data: bytes) -> None:
        buffer, start = self._buffer, 0
        if buffer:
            data = buffer + data
        known = self.pool.known_head(data)
        if known is not None and known.status >= 200:
            self._began(asker, known, data, known.size)
            return
        while True:
            end = data.find(b"\r\n\r\n", max(start, len(buffer) - 3)) + 4
            if end < 4:
                self._buffer = data = data[start:] if start else data
                if len(data) > MAX_HEAD_BYTES or not _may_be_head(data):
                    asker.replica_garbled()
                return
            try:
                head = self.pool.read_head(data[start:end])
            except GarbageError:
                asker.replica_garbled()
                return
            if head.status >= 200:
                break
            start = end  # 100 Continue, 103 Early Hints: not for the client
            self.reused = False  # and whoever sends them has seen the request
        self._began(asker, head, data, end)

    def _began(self, asker: Asker, head: ResponseHead, data: bytes, start: int) -> None:
        """The whole head is here, and in ``data[start:]`` some of the body."""
        self._buffer = b""
        self._body = True
        try:
            asker.answer_began(self, head, data, start)
        except FramingError:
            asker.replica_garbled()


def _may_be_head(data: bytes) -> bool:
    """Whether more bytes can make ``data`` an answer's head: all its lines end with CRLF."""
    begins = data.startswith(b"HTTP/1.") or b"HTTP/1.".startswith(data)
    return begins and data.count(b"\n") == data.count(b"\r\n")
