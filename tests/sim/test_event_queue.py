"""The virtual clock."""

import random

import pytest

from sim.event_queue import EventQueue


def test_events_happen_in_time_order_and_ties_as_announced() -> None:
    queue = EventQueue()
    seen: list[tuple[int, int]] = []
    times = [random.Random(3).randrange(5) for _ in range(200)]
    for number, time in enumerate(times):
        queue.at(float(time), seen.append, (time, number))
    queue.run()
    assert seen == sorted(seen) and len(seen) == 200


def test_events_may_announce_events_at_the_same_time() -> None:
    queue = EventQueue()
    seen: list[object] = []

    def again(left: int) -> None:
        seen.append((queue.now, left))
        if left:
            queue.at(queue.now, again, left - 1)

    queue.at(1.0, again, 3)
    queue.at(1.0, seen.append, "announced before the three that follow")
    queue.run()
    assert seen == [(1.0, 3), "announced before the three that follow", (1.0, 2), (1.0, 1), (1.0, 0)]
    assert not len(queue)


def test_the_past_is_refused() -> None:
    queue = EventQueue()
    queue.at(2.0, lambda: queue.at(1.5, print))
    with pytest.raises(ValueError, match=r"at 1\.5 s, but it is already 2\.0 s"):
        queue.run()
