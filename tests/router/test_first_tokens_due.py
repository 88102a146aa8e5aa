"""Flights come out by the time they are due, equal times in the order they came."""

from hypothesis import given
from hypothesis import strategies as st

from router.routing.decision import Decision, Reason
from router.routing.first_tokens_due import FirstTokensDue
from router.routing.in_flight import InFlight
from router.routing.ledger import Booking
from router.routing.prompt_blocks import Prompt
from tests.router.candidates import candidate

REPLICA = candidate(0)


def flight(number: int) -> InFlight:
    made = InFlight(
        Prompt(keys=(), units=1), Decision(0, Reason.COLD), REPLICA, Booking(0.1, 0.1, 1, 1, 0.0), now=0.0
    )
    made.number = number
    return made


@given(st.lists(st.one_of(st.integers(0, 5).map(float), st.none()), max_size=60))
def test_as_a_sorted_list_has_them(steps: list[float | None]) -> None:
    """A number: one more is due then; ``None``: time moves on by one."""
    due, expected, now = FirstTokensDue(), list[tuple[float, int]](), 0.0
    for number, step in enumerate(steps):
        if step is not None:
            due.push(flight(number), now + step)
            expected.append((now + step, number))
            continue
        now += 1.0
        expected.sort()
        while expected and expected[0][0] <= now:
            first = due.pop(now)
            assert first is not None and (first.due_at, first.number) == expected.pop(0)
        assert due.pop(now) is None
    assert len(due) == len(expected)
