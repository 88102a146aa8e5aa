"""KV events from replicas to routers: late, and now and then lost."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from router.routing.fleet import Fleet
from sim.event_queue import EventQueue


@dataclass(frozen=True, slots=True)
class KvEventSettings:
    """How KV events travel. With them the router reads prompts exactly, in the replicas' own block names."""

    delay_s: float = 0.02
    removal_delay_s: float | None = None
    """How late a removal is told; ``None``: as late as the rest."""
    loss_share: float = 0.0
    """Of batches, lost on the way."""
    replayed: bool = True
    """A gap is filled by replay when the next batch shows it; else the router learns that it missed some."""


class KvEventFeed:
    """Delivers every batch of every replica to every router, in order."""

    def __init__(
        self, queue: EventQueue, fleets: Sequence[Fleet], settings: KvEventSettings, rng: random.Random
    ) -> None:
        self._queue = queue
        self._fleets = fleets
        self._settings = settings
        self._rng = rng
        count = len(fleets[0].replicas)
        self._lost: list[list[CacheEvent]] = [[] for _ in range(count)]
        self._gap = [False] * count
        self._restarted = [False] * count

    def publish(self, replica: int, events: list[CacheEvent]) -> None:
        """``replica`` made a step that stored or removed ``events``."""
        settings = self._settings
        if settings.loss_share and self._rng.random() < settings.loss_share:
            self._gap[replica] = True
            if settings.replayed:
                self._lost[replica].extend(events)
            return
        now = self._queue.now
        if self._restarted[replica]:
            self._restarted[replica] = self._gap[replica] = False
            self._lost[replica].clear()
            events = [CacheCleared(), *events]  # numbers begin again: a router sees that it restarted
        elif self._gap[replica]:
            self._gap[replica] = False
            if settings.replayed:
                events = [*self._lost[replica], *events]
                self._lost[replica].clear()
            else:
                self._queue.at(now + settings.delay_s, self._missed, replica)
        late_s = settings.removal_delay_s
        if late_s is None or late_s == settings.delay_s:
            self._queue.at(now + settings.delay_s, self._deliver, replica, events)
            return
        removals = [event for event in events if isinstance(event, BlocksRemoved)]
        others = [event for event in events if not isinstance(event, BlocksRemoved)]
        if others:
            self._queue.at(now + settings.delay_s, self._deliver, replica, others)
        if removals:
            self._queue.at(now + late_s, self._deliver, replica, removals)

    def restarted(self, replica: int) -> None:
        """``replica`` lost its cache; its next batch shows it."""
        self._restarted[replica] = True

    def _missed(self, replica: int) -> None:
        for fleet in self._fleets:
            fleet.events_missed(replica)

    def _deliver(self, replica: int, events: Sequence[CacheEvent]) -> None:
        for fleet in self._fleets:
            for event in events:
                if isinstance(event, BlocksStored):
                    fleet.blocks_stored(replica, event)
                elif isinstance(event, BlocksRemoved):
                    fleet.blocks_removed(replica, event)
                else:
                    fleet.cache_cleared(replica)
