"""A virtual clock and the events that are to come, in an order that depends on nothing but the input."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any


class EventQueue:
    """Events by time; events of one time happen in the order they were announced.

    >>> queue, seen = EventQueue(), []
    >>> queue.at(2.0, seen.append, "last")
    >>> queue.at(1.0, seen.append, "first")
    >>> queue.at(1.0, seen.append, "second")
    >>> queue.run(); seen, queue.now
    (['first', 'second', 'last'], 2.0)
    """

    __slots__ = ("_announced", "_heap", "now")

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds of virtual time; moves only while ``run`` runs."""
        self._announced = 0
        self._heap: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []

    def __len__(self) -> int:
        return len(self._heap)

    def at(self, time_s: float, action: Callable[..., object], *arguments: Any) -> None:
        """Call ``action(*arguments)`` when the clock shows ``time_s``. Raises ValueError for the past."""
        if time_s < self.now:
            raise ValueError(f"an event at {time_s} s, but it is already {self.now} s")
        self._announced += 1
        heappush(self._heap, (time_s, self._announced, action, arguments))

    @property
    def next_at(self) -> float | None:
        """When the next event happens; ``None`` when there is none."""
        return self._heap[0][0] if self._heap else None

    def run(self, until_s: float | None = None) -> None:
        """Let everything happen until no event is left, or all that happens by ``until_s``."""
        heap = self._heap
        while heap and (until_s is None or heap[0][0] <= until_s):
            self.now, _, action, arguments = heappop(heap)
            action(*arguments)
        if until_s is not None:
            self.now = max(self.now, until_s)
