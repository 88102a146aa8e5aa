"""A router that starts asks the eldest of the others what it knows, and gets it through a list of its own.

::

    newcomer --"warm_from: eldest"--> NAMESPACE:news          the request, with its next batch
    eldest   --RPUSH chunk, ..., b""-> NAMESPACE:knowledge:NEWCOMER --BLPOP--> newcomer

The list dies after a minute if nobody reads it. The giver never has more than a few chunks in it.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from router.routing.fleet import Fleet
from router.state.knowledge import taken_in, written_down
from router.state.peer_tracker import PeerTracker
from router.state.redis_client import FAULTS, Client, connection
from router.state.wire import WireError, decode_chunk, encode_chunk
from router.state_config import StateConfig

log = logging.getLogger("warmroute.state")

PEERS_ANSWER_S = 0.5
"""Routers that are there will have stated what they have outstanding by then."""
CHUNK_LIMIT_S = 2.0
"""Longer without a chunk: the giver is gone."""
CHUNKS_UNDER_WAY = 16
LIST_LIVES_S = 60
POLL_S = 0.02
END = b""


class WarmUp:
    """Both sides of it for one router."""

    def __init__(
        self,
        config: StateConfig,
        router: str,
        fleet: Fleet,
        tracker: PeerTracker,
        ask: Callable[[str], None],
        clock: Callable[[], float],
    ) -> None:
        """``ask`` is called with the peer that is to be asked."""
        self.config = config
        self._router = router
        self._fleet = fleet
        self._tracker = tracker
        self._ask = ask
        self._clock = clock
        self._linked = asyncio.Event()
        self._wanted = asyncio.Event()
        self._peer_heard = asyncio.Event()
        self.no_longer_awaited = asyncio.Event()
        """A start need not wait: it is warm, or nobody was heard at once."""
        self.source: str | None = None
        """The peer this router was warmed by."""

    def linked(self) -> None:
        """The store works, and what others tell is heard."""
        self._linked.set()

    def look(self) -> None:
        """Something was heard: somebody is there, or asks to be warmed."""
        if self._tracker.live:
            self._peer_heard.set()
        if self._tracker.to_warm:
            self._wanted.set()

    def _list(self, router: str) -> str:
        return f"{self.config.namespace}:knowledge:{router}"

    # --- the newcomer ---------------------------------------------------------------------------

    async def take(self) -> None:
        """Ask one peer after the other until one has told all it knows. Alone: nothing.

        Begins when the store works for the first time, however long after the start that is. Who was there
        before is heard within the lease.
        """
        await self._linked.wait()
        for limit_s in (PEERS_ANSWER_S, self.config.lease_s):
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_s):
                    await self._peer_heard.wait()
            if not self._peer_heard.is_set():
                self.no_longer_awaited.set()
        await self._ask_one_after_the_other()
        self.no_longer_awaited.set()

    async def _ask_one_after_the_other(self) -> None:
        asked: set[str] = set()
        while (peer := self._tracker.eldest(asked)) is not None:
            asked.add(peer)
            self._ask(peer)
            try:
                async with (
                    asyncio.timeout(LIST_LIVES_S),
                    connection(self.config, wait_s=CHUNK_LIMIT_S) as client,
                ):
                    if await self._take_from(client):
                        self.source = peer
                        log.info("knows what router %s knew", peer)
                        return
            except FAULTS:
                continue  # the status tells what is wrong with the store
            except WireError as error:
                log.warning("what router %s knows cannot be read: %s", peer, error)

    async def _take_from(self, client: Client) -> bool:
        """True when all of it came."""
        while True:
            popped = await client.blpop([self._list(self._router)], timeout=CHUNK_LIMIT_S)
            if popped is None:
                return False
            if popped[1] == END:
                return True
            taken_in(self._fleet, "", decode_chunk(popped[1]), self._clock())

    # --- the one that knows ---------------------------------------------------------------------

    async def give_for_ever(self) -> None:
        """Warm whoever asks, one at a time."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while self._tracker.to_warm:
                router = self._tracker.to_warm.pop()
                try:
                    async with connection(self.config) as client:
                        await self._give(client, router)
                except FAULTS:
                    log.info("router %s could not be told all this one knows", router)

    async def _give(self, client: Client, router: str) -> None:
        name = self._list(router)
        for chunk in written_down(self._fleet):
            await self._push(client, name, encode_chunk(chunk))
        await self._push(client, name, END)

    async def _push(self, client: Client, name: str, data: bytes) -> None:
        """Wait while the newcomer is behind; raises ``TimeoutError`` when it does not read at all."""
        async with asyncio.timeout(CHUNK_LIMIT_S + self.config.timeout_ms / 1_000.0):
            under_way = await client.rpush(name, data)
            await client.expire(name, LIST_LIVES_S)
            while under_way > CHUNKS_UNDER_WAY:
                await asyncio.sleep(POLL_S)
                under_way = await client.llen(name)
