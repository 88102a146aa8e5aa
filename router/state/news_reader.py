"""Hears the other routers: reads the stream as it grows and passes batches on."""

import asyncio
import logging
import random
from collections.abc import Callable

from router.state.link_status import LinkStatus
from router.state.news_writer import FIRST_BACKOFF_S, MAX_BACKOFF_S, stream_name
from router.state.peer_tracker import PeerTracker
from router.state.redis_client import FAULTS, Client, connection, described
from router.state.wire import WireError, decode_batch
from router.state_config import StateConfig

log = logging.getLogger("warmroute.state")

READ_BATCHES = 256
READ_WAIT_S = 0.5
EVENTS_AT_ONCE = 100
"""After so many events the loop's other work gets its turn."""


class NewsReader:
    """Reads on where it stopped, whatever happened to the connection meanwhile."""

    def __init__(
        self,
        config: StateConfig,
        tracker: PeerTracker,
        status: LinkStatus,
        clock: Callable[[], float],
        *,
        connected: Callable[[], None],
        heard: Callable[[], None],
    ) -> None:
        """``connected``: from now on everything is heard. ``heard``: some batches were passed on."""
        self.config = config
        self._tracker = tracker
        self._status = status
        self._clock = clock
        self._connected = connected
        self._heard = heard
        self._last = b""
        """The entry read last."""
        self.malformed = 0

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            try:
                async with connection(self.config, wait_s=READ_WAIT_S) as client:
                    await self._resume(client)
                    self._connected()
                    while True:
                        await self._read(client)
                        backoff_s = FIRST_BACKOFF_S
                        await asyncio.sleep(self.config.flush_ms / 1_000.0)
            except FAULTS as error:
                self._status.reading(described(error))
            except Exception:
                log.exception("a fault of the router's own")
                self._status.reading("a fault of the router's own; see the log")
            await asyncio.sleep(backoff_s * (0.5 + random.random()))
            backoff_s = min(MAX_BACKOFF_S, 2.0 * backoff_s)

    @property
    def _timeout_s(self) -> float:
        return self.config.timeout_ms / 1_000.0

    async def _resume(self, client: Client) -> None:
        """Find the entry to read on from: at first the newest there is, later where reading had stopped.

        A store that came back older than it was, or empty, is read from its beginning: what was heard before
        is told from what is new by its number.
        """
        async with asyncio.timeout(self._timeout_s):
            newest = await client.xrevrange(stream_name(self.config), count=1)
        end: bytes = newest[0][0] if newest else b"0-0"
        if not self._last:
            self._last = end
        elif _place(self._last) > _place(end):
            self._last = b"0-0"

    async def _read(self, client: Client) -> None:
        async with asyncio.timeout(READ_WAIT_S + self._timeout_s):
            reply = await client.xread(
                {stream_name(self.config): self._last}, count=READ_BATCHES, block=int(1_000 * READ_WAIT_S)
            )
        self._status.reading(None)
        if not reply:
            # Or all that is new has an older name: the store lost the stream, its clock was set back.
            await self._resume(client)
        events = 0
        for self._last, fields in reply[0][1] if reply else ():
            events += self._take(fields.get(b"b", b""))
            if events >= EVENTS_AT_ONCE:
                self._heard()
                await asyncio.sleep(0)
                events = 0
        self._heard()

    def _take(self, data: bytes) -> int:
        """One batch; how many events it had."""
        try:
            batch = decode_batch(data)
        except WireError as error:
            if not self.malformed:
                log.warning("another router's news cannot be read (%s); are all of one version?", error)
            self.malformed += 1
            return 0
        try:
            self._tracker.received(batch, self._clock())
        except Exception:
            log.exception("a fault of the router's own, at news of router %s", batch.router)
        return len(batch.events)


def _place(entry: bytes) -> tuple[int, int]:
    """An entry's place in the stream, to compare by."""
    milliseconds, _, number = entry.partition(b"-")
    return int(milliseconds), int(number)
