"""The ledger returns to zero whatever happens, and its backlog never exceeds what is queued."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.ledger import MAX_UTILIZATION, Booking, Ledger, Speed

steps = st.lists(
    st.tuples(
        st.sampled_from(["book", "first", "release"]), st.integers(0, 30), st.floats(0, 5), st.floats(0, 3)
    ),
    max_size=80,
)


@given(steps)
@settings(deadline=None)
def test_counts_are_exact_and_return_to_zero(script: list[tuple[str, int, float, float]]) -> None:
    ledger, bookings, now = Ledger(), [], 0.0
    for action, which, prefill_s, pause in script:
        now += pause
        if action == "book":
            bookings.append(ledger.book(prefill_s, which * 10, which, now))
        elif bookings:
            booking = bookings[which % len(bookings)]
            if action == "first":
                ledger.first_token(booking, now)
            else:
                assert ledger.release(booking, now) or booking.state == Booking.RELEASED
        queued = [b for b in bookings if b.state == Booking.QUEUED]
        live = [b for b in bookings if b.state != Booking.RELEASED]
        assert ledger.queued == len(queued)
        assert ledger.decoding == len(live) - len(queued)
        assert ledger.outstanding_tokens == sum(b.new_tokens for b in queued) + sum(
            b.expected_output_tokens for b in live
        )
        predicted = sum(b.prior_s for b in queued)
        late = ledger.late_s(now) * len(queued)
        assert 0.0 <= ledger.backlog_s(now) <= max(late, predicted) + 1e-6
        assert ledger.queued_prefill_s == pytest.approx(predicted, abs=1e-6)
        assert 0.0 <= ledger.utilization(now) <= MAX_UTILIZATION
    for booking in bookings:
        ledger.release(booking, now)
        assert not ledger.release(booking, now), "released once"
    assert (ledger.queued, ledger.decoding, ledger.outstanding_tokens) == (0, 0, 0)
    assert ledger.backlog_s(now) == 0.0 and ledger.queued_prefill_s == 0.0


def test_a_late_prefill_leaves_what_is_behind_it() -> None:
    ledger = Ledger()
    first = ledger.book(1.0, 0, 0, now=0.0)
    ledger.book(0.5, 0, 0, now=0.0)
    assert ledger.backlog_s(1.5) == 0.0, "predicted to be over just now"
    assert ledger.backlog_s(3.0) == pytest.approx(3.0), "1.5 s late: as much again for each of the two"
    ledger.book(0.5, 0, 0, now=3.0)
    assert ledger.backlog_s(3.0) == pytest.approx(3.0), "one more booking does not make it look on time"
    ledger.first_token(first, now=3.0)
    assert ledger.backlog_s(3.0) == pytest.approx(1.0)


def test_bookings_are_repriced_when_the_speed_is_learned() -> None:
    speed = Speed()
    ledger = Ledger(speed)
    bookings = [ledger.book(0.05, 0, 0, now=0.0) for _ in range(4)]
    assert ledger.backlog_s(0.0) == pytest.approx(0.2)
    speed.prefill_factor = 60.0  # the prior was sixty times too fast
    ledger.first_token(bookings[0], now=3.0)
    assert ledger.backlog_s(3.0) == pytest.approx(9.0)
    ledger.book(3.0, 0, 0, now=3.0)  # predicted with the new factor
    assert ledger.backlog_s(3.0) == pytest.approx(12.0)


def test_a_first_token_out_of_order_rebases() -> None:
    ledger = Ledger()
    long = ledger.book(2.0, 0, 0, now=0.0)
    short = ledger.book(0.1, 0, 0, now=0.0)
    ledger.first_token(short, now=0.2)
    assert ledger.backlog_s(0.2) == pytest.approx(2.0)
    ledger.first_token(short, now=0.3)  # said twice: counted once
    assert (ledger.queued, ledger.decoding) == (1, 1)
    ledger.first_token(long, now=2.0)
    assert ledger.backlog_s(2.0) == 0.0


def test_utilization_is_the_last_minute() -> None:
    ledger = Ledger()
    for second in range(300):
        ledger.release(ledger.book(0.4, 0, 0, now=float(second)), now=second + 0.4)
    assert ledger.utilization(300.0) == pytest.approx(0.4, rel=0.05)
    assert ledger.utilization(420.0) == pytest.approx(0.4 * 0.135, rel=0.1)


def test_a_gross_overestimate_is_no_load_once_its_answer_came() -> None:
    ledger = Ledger()
    booking = ledger.book(prefill_s=7_000.0, new_tokens=2_000_000, expected_output_tokens=1, now=0.0)
    assert ledger.utilization(0.4) == MAX_UTILIZATION
    assert ledger.release(booking, now=0.4)
    assert ledger.utilization(1.0) < 0.01


def test_prompts_computed_together_are_each_their_load() -> None:
    ledger = Ledger()
    both = [ledger.book(prefill_s=3.0, new_tokens=1_000, expected_output_tokens=1, now=0.0) for _ in range(2)]
    for booking in both:  # one step gave both their first token
        ledger.first_token(booking, now=6.0)
    assert ledger.utilization(6.0) == pytest.approx(0.1, rel=0.1)
