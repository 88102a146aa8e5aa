"""The router's public port: listens, owns every connection, sweeps their limits, stops in good order."""

import asyncio
import logging
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable

from router.config import RouterConfig
from router.proxy.client_connection import ClientConnection
from router.proxy.counters import Counters
from router.proxy.forwarding import LastForwarding
from router.proxy.hold_clock import HoldClock
from router.proxy.prompt_reader import PromptReader
from router.proxy.request_reader import LastHead
from router.proxy.service import Service
from router.routing.fleet import Fleet

logger = logging.getLogger("warmroute.proxy")

BACKLOG = 4096
STOP_POLL_S = 0.02
SWEEP_AT_ONCE = 256
SWEEP_PAUSE_S = 0.002
"""Thousands of clients are swept in pieces, with the loop's other work in between."""
LAST_REQUESTS_S = 0.1
"""Clients that had just come in when the door closed may still say what they want."""
LAST_FLUSH_S = 1.0
"""After ``stop``'s time-out, clients have so long to take their last bytes."""


class DataPlane:
    """The request path of one router. Runs in the loop that ``start`` is awaited in."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        counters: Counters,
        *,
        prompt_reader: PromptReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service = Service(fleet, config, counters, clock)
        self.service.prompt_reader = prompt_reader
        self._listen = config.listen
        self._server: asyncio.Server | None = None
        self.last_head = LastHead()
        self.last_forwarding = LastForwarding()
        self._clients: set[ClientConnection] = set()
        self._sweeping: asyncio.TimerHandle | None = None
        self._to_sweep: list[ClientConnection] = []
        self._hold_clock = HoldClock(self.service)
        self.address = config.listen
        """Where it really listens: HOST:PORT or unix:/path."""

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen on ``config.listen``, with ``tls`` if given. Raises ``OSError`` where that fails."""
        loop = asyncio.get_running_loop()
        handshake_s = None if tls is None else self.service.settings.client_header_s
        if self._listen.startswith("unix:"):
            path = self._listen.removeprefix("unix:")
            _remove_stale_socket(path)
            self._server = await loop.create_unix_server(
                self._client, path, backlog=BACKLOG, ssl=tls, ssl_handshake_timeout=handshake_s
            )
        else:
            host, _, port = self._listen.rpartition(":")
            self._server = await loop.create_server(
                self._client,
                host.strip("[]"),
                int(port),
                backlog=BACKLOG,
                reuse_address=True,
                ssl=tls,
                ssl_handshake_timeout=handshake_s,
            )
            name = self._server.sockets[0].getsockname()
            self.address = f"[{name[0]}]:{name[1]}" if ":" in name[0] else f"{name[0]}:{name[1]}"
        self._sweep_later()

    def _client(self) -> ClientConnection:
        return ClientConnection(self)

    def begin_shutdown(self) -> None:
        """``/readiness`` fails from now on; requests are still accepted."""
        self.service.shutting_down = True

    async def stop(self, timeout_s: float) -> None:
        """Accept nothing more, let requests finish for ``timeout_s``, then break what is left."""
        self.begin_shutdown()
        if self._server is not None:
            self._server.close()
            await self._gone_within(LAST_REQUESTS_S, self._unserved_connections)
        for client in list(self._clients):
            client.shut_down(now=False)
        if not await self._gone_within(timeout_s, self._client_connections):
            logger.warning("%d connection(s) still busy at shutdown are broken off", len(self._clients))
            for client in list(self._clients):
                client.shut_down(now=True)
            await self._gone_within(LAST_FLUSH_S, self._client_connections)
        for client in list(self._clients):
            client.abort()
        await self._gone_within(LAST_FLUSH_S, self._client_connections)
        for pool in self.service.pools():
            pool.abort()
        await self._gone_within(LAST_FLUSH_S, self._replica_connections)
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._hold_clock.stop()
        if self._listen.startswith("unix:"):
            _remove_stale_socket(self._listen.removeprefix("unix:"))

    async def _gone_within(self, limit_s: float, count: Callable[[], int]) -> bool:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + limit_s
        while count():
            if loop.time() >= deadline:
                return False
            await asyncio.sleep(STOP_POLL_S)
        return True

    def _client_connections(self) -> int:
        return len(self._clients)

    def _unserved_connections(self) -> int:
        return sum(client.unserved for client in self._clients)

    def _replica_connections(self) -> int:
        return sum(pool.open_connections for pool in self.service.pools())

    def apply(self, config: RouterConfig) -> None:
        """Use ``config``'s settings for requests that begin from now on; the address stays."""
        self.service.apply(config)
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweep_later()

    # --- from client connections -----------------------------------------------------------------

    def client_opened(self, client: ClientConnection) -> bool:
        """A client connected. False: it is one too many."""
        self._clients.add(client)
        self.service.counters.open_client_connections = len(self._clients)
        return len(self._clients) <= self.service.settings.client_connections

    def client_lost(self, client: ClientConnection) -> None:
        """A client's connection is gone."""
        self._clients.discard(client)
        self.service.counters.open_client_connections = len(self._clients)

    # --- limits ----------------------------------------------------------------------------------

    def _sweep_later(self) -> None:
        loop = asyncio.get_running_loop()
        self._sweeping = loop.call_later(self.service.settings.sweep_s, self._sweep)

    def _sweep(self) -> None:
        service = self.service
        now, settings = service.clock(), service.settings
        if not self._to_sweep:
            self._to_sweep = list(self._clients)
        for client in self._to_sweep[-SWEEP_AT_ONCE:]:
            if client not in self._clients:
                continue  # gone since
            try:
                client.sweep(now, settings)
            except Exception:
                logger.exception("a fault of the router's own")
                client.abort()
        del self._to_sweep[-SWEEP_AT_ONCE:]
        if self._to_sweep:
            self._sweeping = asyncio.get_running_loop().call_later(SWEEP_PAUSE_S, self._sweep)
            return
        service.forget_departed()
        not_idle_before = now - settings.replica_keepalive_s
        for pool in service.pools():
            pool.sweep(not_idle_before)
        self._sweep_later()


def _remove_stale_socket(path: str) -> None:
    """Remove a socket that an earlier process left, and nothing else."""
    try:
        if stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(path) != 0:
                    os.unlink(path)
    except FileNotFoundError:
        pass
