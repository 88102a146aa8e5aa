"""What a cache did since it was last asked: events for whoever follows it, evictions for a lower tier."""

from typing import TypeVar

from replica.contract.kv_events import CacheEvent
from replica.kv_cache.cache import Evicted

Item = TypeVar("Item")


def drained(kept: list[Item]) -> list[Item]:
    """All that is in ``kept``, which is empty afterwards.

    >>> kept = [1, 2]
    >>> drained(kept), kept
    ([1, 2], [])
    """
    items = kept[:]
    kept.clear()
    return items


class CacheRecord:
    """Of one cache, which appends to the two lists where somebody asked for them."""

    def __init__(self) -> None:
        self._events: list[CacheEvent] = []
        self._evictions: list[Evicted] = []

    def take_events(self) -> list[CacheEvent]:
        """Events since the last call, in order; empty unless ``record_events``."""
        return drained(self._events)

    def take_evictions(self) -> list[Evicted]:
        """Evictions since the last call, in order; empty unless ``record_evictions``."""
        return drained(self._evictions)
