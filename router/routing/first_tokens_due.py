"""When requests that show no first token (not streamed) are taken to have it: a queue by that time."""

from router.routing.in_flight import InFlight


class FirstTokensDue:
    """A binary heap over the flights themselves: no pair is made for each, and none is compared by Python.

    Equal times go in the order of ``push``.
    """

    __slots__ = ("_heap", "_pushed")

    def __init__(self) -> None:
        self._heap: list[InFlight] = []
        self._pushed = 0

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, flight: InFlight, due_at: float) -> None:
        """``flight``, once, is due at ``due_at``."""
        self._pushed += 1
        flight.due_at, flight.due_order = due_at, self._pushed
        heap = self._heap
        place = len(heap)
        heap.append(flight)
        while place:
            above = (place - 1) >> 1
            other = heap[above]
            if not _before(flight, other):
                break
            heap[place] = other
            place = above
        heap[place] = flight

    def pop(self, now: float) -> InFlight | None:
        """The one due first, if that is by ``now``."""
        heap = self._heap
        if not heap:
            return None
        first = heap[0]
        if first.due_at > now:
            return None
        moved = heap.pop()
        if moved is not first:
            self._sink(moved)
        return first

    def _sink(self, flight: InFlight) -> None:
        """Put ``flight`` where the first one was, and from there as far down as it belongs."""
        heap = self._heap
        place, size = 0, len(heap)
        while (below := 2 * place + 1) < size:
            other = heap[below]
            if below + 1 < size and _before(heap[below + 1], other):
                below += 1
                other = heap[below]
            if not _before(other, flight):
                break
            heap[place] = other
            place = below
        heap[place] = flight


def _before(one: InFlight, other: InFlight) -> bool:
    if one.due_at != other.due_at:
        return one.due_at < other.due_at
    return one.due_order < other.due_order
