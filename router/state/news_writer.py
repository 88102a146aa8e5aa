"""Tells the other routers: adds the journal's news to the stream, at once, or in batches if there is much."""

import asyncio
import logging
import random
from collections.abc import Callable, Iterable
from contextlib import suppress

from router.routing.journal import Journal
from router.routing.peer_events import PeerEvent
from router.routing.replica_state import ReplicaState
from router.state.link_status import LinkStatus
from router.state.peer_tracker import PeerTracker
from router.state.redis_client import FAULTS, Client, answered, connection, described
from router.state.wire import EVERYBODY, Batch, encode_batch
from router.state_config import StateConfig

log = logging.getLogger("warmroute.state")

STREAM_BATCHES = 10_000
"""Redis keeps about so many: 6 s of eight busy routers. Who is further behind finds a gap and asks."""
STREAM_LIVES_S = 3_600
"""Without any router the stream goes."""
BATCH_EVENTS = 100
"""More goes into the next batches: whoever hears it has requests to serve in between."""
FIRST_BACKOFF_S, MAX_BACKOFF_S = 0.1, 1.0
LEAVE_LIMIT_S = 1.0


def stream_name(config: StateConfig) -> str:
    """The key of the stream that all routers of one fleet write to and read."""
    return f"{config.namespace}:news"


class NewsWriter:
    """What cannot be told is dropped; when telling works again, a statement makes up for it."""

    def __init__(
        self,
        config: StateConfig,
        journal: Journal,
        replicas: Iterable[ReplicaState],
        tracker: PeerTracker,
        status: LinkStatus,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self._journal = journal
        self._replicas = replicas
        self._tracker = tracker
        self._status = status
        self._clock = clock
        self._news = asyncio.Event()
        self._backlog: list[PeerEvent] = []
        """Taken, and too much for one batch."""
        self._restate = True
        self._ask_all = False
        self._warm_from = ""
        self._number = 0
        self._expire_at = 0.0
        self.batches = 0
        self.bytes = 0
        journal.wake = self.wake

    def wake(self) -> None:
        """There is something to tell."""
        self._news.set()

    def ask_all(self) -> None:
        """Have all others state what they have outstanding: what they told may be lost."""
        self._ask_all = True
        self.wake()

    def ask_for_warmth(self, peer: str) -> None:
        """Have ``peer`` write down what it knows."""
        self._warm_from = peer
        self.wake()

    async def run(self) -> None:
        """Until cancelled."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            self._restate = True
            try:
                async with connection(self.config) as client:
                    while True:
                        await self._tell(client)
                        backoff_s = FIRST_BACKOFF_S
                        await self._wait()
            except FAULTS as error:
                self._status.writing(described(error), answered=answered(error))
            except Exception:
                log.exception("a fault of the router's own")
                self._status.writing("a fault of the router's own; see the log")
            self._journal.discard()
            await asyncio.sleep(backoff_s * (0.5 + random.random()))
            backoff_s = min(MAX_BACKOFF_S, 2.0 * backoff_s)

    async def leave(self) -> None:
        """Tell the others that this router is no more; give up after a second."""
        with suppress(*FAULTS):
            async with asyncio.timeout(LEAVE_LIMIT_S), connection(self.config) as client:
                self._number += 1
                await self._add(client, Batch(self._journal.router, self._number, leaving=True))

    async def _wait(self) -> None:
        """Until there is news, or it is time for a sign of life; ``flush_ms`` after the last batch at best.

        News that comes after a pause goes out at once: another router may be waiting for just that.
        """
        with suppress(TimeoutError):
            async with asyncio.timeout(min(1.0, self.config.lease_s / 5.0)):
                await asyncio.sleep(self.config.flush_ms / 1_000.0)
                await self._news.wait()
        self._news.clear()

    async def _tell(self, client: Client) -> None:
        """Send what there is: news, a statement if one is wanted, questions, or just a sign of life."""
        now, tracker = self._clock(), self._tracker
        outstanding, again = None, None
        if self._restate or tracker.asked:
            self._restate = tracker.asked = False
            again, tracker.lacked = tracker.lacked, None
            self._journal.lost(self._backlog)
            outstanding, self._backlog = self._journal.statement(self._replicas, now, again)
        else:
            self._backlog += self._journal.take()
        events, self._backlog = self._backlog[:BATCH_EVENTS], self._backlog[BATCH_EVENTS:]
        if self._backlog:
            self.wake()
        ask, lacks = tracker.ask(now)
        if self._ask_all:
            ask.append(EVERYBODY)
        self._ask_all = False
        warm_from, self._warm_from = self._warm_from, ""
        self._number += 1
        batch = Batch(
            self._journal.router, self._number, events, outstanding, ask, warm_from, lacks=lacks, again=again
        )
        try:
            await self._add(client, batch)
        except BaseException:
            self._journal.lost(events)
            raise
        self._journal.told(self._number, events)
        self._status.writing(None)

    async def _add(self, client: Client, batch: Batch) -> None:
        data, now, stream = encode_batch(batch), self._clock(), stream_name(self.config)
        self._tracker.sent(batch.number, now)
        async with asyncio.timeout(self.config.timeout_ms / 1_000.0):
            await client.xadd(stream, {b"b": data}, maxlen=STREAM_BATCHES, approximate=True)
            if now >= self._expire_at:
                self._expire_at = now + STREAM_LIVES_S / 4
                await client.expire(stream, STREAM_LIVES_S)
        self.batches += 1
        self.bytes += len(data)
