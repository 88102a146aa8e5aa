"""Shared state in Redis: news of all routers goes through one stream, in batches, beside the request path.

::

    fleet -> journal -> writer --XADD-->  NAMESPACE:news  --XREAD--> reader -> tracker -> fleet.peers

Every task has a connection of its own, which is thrown away after any fault: a reply that comes late can then
meet nobody else's question. What cannot be told is dropped; after the fault this router states all that it
has outstanding, and asks the others to. Nothing on the request path waits for any of this.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable
from contextlib import suppress

from router.config_values import masked_url
from router.ended_tasks import end_tasks
from router.routing.fleet import Fleet
from router.routing.journal import Journal
from router.state.link_status import LinkState, LinkStatus
from router.state.memory_state import MemoryState
from router.state.news_reader import NewsReader
from router.state.news_writer import NewsWriter
from router.state.peer_tracker import PeerTracker
from router.state.shared_state import Callbacks, PeerReport, StateReport
from router.state.warm_up import WarmUp
from router.state_config import StateConfig

log = logging.getLogger("warmroute.state")

WARM_LIMIT_S = 2.0
"""A start waits at most so long for what the others know; the rest comes while requests are served."""


class RedisState:
    """Owns the fleet's journal and feeds its peers."""

    def __init__(
        self,
        config: StateConfig,
        fleet: Fleet,
        callbacks: Callbacks,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert config.url is not None, "checked by the config"
        self._lease_s = config.lease_s
        self._fleet = fleet
        self._callbacks = callbacks
        self._clock = clock
        self.router = f"{socket.gethostname()}-{os.getpid()}-{os.urandom(3).hex()}"
        self._journal = fleet.journal = Journal(self.router, fleet.caches.exact)
        self._tracker = PeerTracker(self.router, fleet.peers, config.lease_s)
        self._status = LinkStatus(masked_url(config.url), clock, self._state_changed)
        self._writer = NewsWriter(config, self._journal, fleet.replicas, self._tracker, self._status, clock)
        self._reader = NewsReader(
            config,
            self._tracker,
            self._status,
            clock,
            connected=self._writer.ask_all,
            heard=self._after_news,
        )
        self._warm_up = WarmUp(config, self.router, fleet, self._tracker, self._writer.ask_for_warmth, clock)
        self._snapshot = MemoryState(config, fleet, clock=clock)
        self._first_state = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Connect, in the background; wait a little for what the others know, else take what the file has."""
        for name, work in (
            ("state writer", self._writer.run()),
            ("state reader", self._reader.run()),
            ("state leases", self._watch_leases()),
            ("state donor", self._warm_up.give_for_ever()),
            ("state warm-up", self._warm_up.take()),
        ):
            task = asyncio.create_task(work, name=name)
            task.add_done_callback(_log_fault)
            self._tasks.append(task)
        with suppress(TimeoutError):
            async with asyncio.timeout(WARM_LIMIT_S):
                await self._first_state.wait()
                if self._status.state is not LinkState.CUT_OFF:
                    await self._warm_up.no_longer_awaited.wait()
        await self._snapshot.start(read=self._warm_up.source is None)

    async def stop(self) -> None:
        """Tell the others that this router leaves; end all tasks."""
        tasks = list(self._tasks)
        self._tasks.clear()
        await end_tasks(tasks)
        await self._snapshot.stop()
        if self._status.state is not LinkState.CUT_OFF:
            await self._writer.leave()
        self._fleet.journal = None

    def apply(self, config: StateConfig) -> None:
        """Log in with the credentials of ``config`` from the next connection on."""
        self._writer.config = self._reader.config = self._warm_up.config = config

    def report(self) -> StateReport:
        """How it stands."""
        now, tracker, status = self._clock(), self._tracker, self._status
        outstanding = self._fleet.peers.outstanding
        kept = self._snapshot.report()
        return StateReport(
            kind="redis",
            state=status.state.value,
            fault=status.fault,
            since_s=now - status.since,
            changes=status.changes,
            router=self.router,
            peers=tuple(
                PeerReport(peer.router, now - peer.heard_at, outstanding(peer.router), peer.gaps)
                for peer in tracker.live.values()
            ),
            lag_ms=None if tracker.lag_s is None else tracker.lag_s * 1_000.0,
            batches_sent=self._writer.batches,
            bytes_sent=self._writer.bytes,
            batches_received=tracker.batches,
            events_received=tracker.events,
            gaps=tracker.gaps,
            late_batches=tracker.late,
            dropped_events=self._journal.dropped,
            unknown_replicas=self._fleet.peers.unknown,
            malformed=self._reader.malformed,
            warmed_from=self._warm_up.source or kept.warmed_from,
            snapshot_written=kept.snapshot_written,
        )

    def _after_news(self) -> None:
        """What was heard may ask for an answer, free held requests, or cast doubt on a replica."""
        now, tracker, doubted = self._clock(), self._tracker, self._fleet.peers.doubted
        self._fleet.tenants.seen(1 + len(tracker.live))
        if tracker.asked or tracker.wants(now):
            self._writer.wake()
        self._warm_up.look()
        if self._fleet.outbox:
            self._callbacks.released(now)
        while doubted:
            self._callbacks.doubted(doubted.pop())

    async def _watch_leases(self) -> None:
        while True:
            await asyncio.sleep(min(1.0, self._lease_s / 10.0))
            for router in self._tracker.expire(self._clock()):
                if self._status.state is not LinkState.CUT_OFF:  # else that was said
                    log.warning("router %s is gone: not heard for %.1f s", router, self._lease_s)
            self._after_news()

    def _state_changed(self, state: LinkState) -> None:
        self._first_state.set()
        if state is LinkState.CUT_OFF:
            self._fleet.tenants.alone()
        else:
            self._fleet.tenants.sharing()
            self._warm_up.linked()
        # Work of others that is not heard of makes replicas look slow.
        self._fleet.speed.blind = state is LinkState.CUT_OFF and bool(self._tracker.live)


def _log_fault(task: "asyncio.Task[None]") -> None:
    if not task.cancelled() and (fault := task.exception()) is not None:
        log.error("a fault of the router's own ended its %s", task.get_name(), exc_info=fault)
