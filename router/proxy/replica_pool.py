"""The connections to one replica: as many as there are requests, the idle ones reused last in, first out."""

import asyncio
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from router.proxy.counters import Counters
from router.proxy.replica_access import ReplicaAccess
from router.proxy.replica_connection import ReplicaConnection
from router.proxy.response_head import ResponseHead, read_response_head
from router.proxy.sockets import is_own
from router.proxy.turn_writes import TurnWrites

if TYPE_CHECKING:
    from router.proxy.attempt import Attempt


KNOWN_HEADS = 64
KNOWN_HEAD_BYTES = 1024


class ReplicaPool:
    """Connections to one replica. An exchange takes one, and gives it back after a whole answer."""

    __slots__ = (
        "_closed",
        "_connecting",
        "_heads",
        "_idle",
        "_last_head",
        "_last_raw",
        "_open",
        "_tls",
        "counters",
        "host",
        "host_line",
        "key_line",
        "name",
        "port",
        "takes_salt",
        "writes",
    )

    def __init__(self, name: str, access: ReplicaAccess, counters: Counters, writes: TurnWrites) -> None:
        self.name = name
        self.counters = counters
        self.writes = writes
        parts = urlsplit(access.url)
        self.host = parts.hostname or ""
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.host_line = b"host: %b\r\n" % parts.netloc.encode("ascii", "replace")
        """As it stands in the heads of requests to the replica."""
        self.key_line: bytes
        """The replica's own key, likewise; empty where there is none."""
        self.takes_salt: bool
        """Requests there carry the tenant's cache salt."""
        self._use(access)
        self._closed = False
        self._heads: dict[bytes, ResponseHead] = {}
        """Heads read lately: a replica's heads repeat, but for the date and some lengths."""
        self._last_raw = b""
        self._last_head: ResponseHead | None = None
        """The one read last, and its bytes."""
        self._idle: list[ReplicaConnection] = []
        """The one that became idle last is the last."""
        self._open: set[ReplicaConnection] = set()
        self._connecting: set[asyncio.Task[None]] = set()

    def _use(self, access: ReplicaAccess) -> None:
        key = access.api_key
        self.key_line = b"" if key is None else b"authorization: Bearer %b\r\n" % key.encode()
        self._tls = access.tls
        self.takes_salt = access.takes_salt

    def reaccessed(self, access: ReplicaAccess) -> None:
        """Another key or another TLS, for requests and for connections made from now on; the same URL."""
        if access.tls is not self._tls:
            self._close_idle()  # trusted by the old rule
        self._use(access)

    def take_idle(self, not_idle_before: float) -> ReplicaConnection | None:
        """The connection that became idle last, unless that was before ``not_idle_before`` (seconds)."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if connection.usable:
                if connection.idle_since >= not_idle_before:
                    return connection
                connection.close()
        return None

    def give_back(self, connection: ReplicaConnection, now: float) -> None:
        """The connection may serve another request."""
        if self._closed:
            connection.close()
            return
        connection.idle_since = now
        self._idle.append(connection)

    def connect(self, attempt: "Attempt") -> "asyncio.Task[None]":
        """Open a connection; ``attempt`` is told how it went. Cancel the task to forget it."""
        task = asyncio.get_running_loop().create_task(self._connect(attempt), name=f"connect {self.name}")
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)
        return task

    async def _connect(self, attempt: "Attempt") -> None:
        loop = asyncio.get_running_loop()
        connection = ReplicaConnection(self)
        taken = False
        try:
            await loop.create_connection(
                lambda: connection,
                self.host,
                self.port,
                ssl=self._tls,
                server_hostname=self.host if self._tls else None,
            )
        except (OSError, UnicodeError) as error:
            attempt.connect_failed(type(error).__name__, own=is_own(error))
        else:
            taken = True
            attempt.connected(connection)
        finally:
            if not taken:
                connection.abandon()

    def known_head(self, data: bytes) -> ResponseHead | None:
        """The head that ``data`` begins with, if that is the one ``read_head`` read last."""
        head = self._last_head
        return head if head is not None and data.startswith(self._last_raw) else None

    def read_head(self, head: bytes) -> ResponseHead:
        """The answer in ``head``, which is whole. Raises ``GarbageError``."""
        if self._last_head is not None and head == self._last_raw:
            return self._last_head
        known = self._heads.get(head)
        if known is None:
            known = read_response_head(head)
            if len(self._heads) >= KNOWN_HEADS:
                self._heads.clear()
            if len(head) <= KNOWN_HEAD_BYTES:
                self._heads[head] = known
        if len(head) <= KNOWN_HEAD_BYTES:
            self._last_raw, self._last_head = head, known
        return known

    def opened(self, connection: ReplicaConnection) -> None:
        """A connection was made."""
        self._open.add(connection)
        self.counters.open_replica_connections += 1

    def lost(self, connection: ReplicaConnection) -> None:
        """A connection is gone. If it was idle, ``take_idle`` and ``sweep`` pass over it."""
        if connection in self._open:
            self._open.discard(connection)
            self.counters.open_replica_connections -= 1

    def sweep(self, not_idle_before: float) -> None:
        """Close what has been idle since before then."""
        idle = self._idle
        old = 0
        while old < len(idle) and (idle[old].idle_since < not_idle_before or not idle[old].usable):
            idle[old].close()
            old += 1
        del idle[:old]

    def close(self) -> None:
        """No more requests come: close the idle connections now, those in use when given back."""
        self._closed = True
        self._close_idle()

    def _close_idle(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def abort(self) -> None:
        """Break every connection, now."""
        for task in list(self._connecting):
            task.cancel()
        for connection in list(self._open):
            connection.abort()

    @property
    def open_connections(self) -> int:
        """Connections there are, idle or not."""
        return len(self._open)
