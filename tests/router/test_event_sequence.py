"""Numbers of batches: gaps, duplicates and restarts are told apart."""

from hypothesis import given
from hypothesis import strategies as st

from router.routing.event_sequence import REMEMBERED, EventSequence, Verdict


def after(count: int) -> EventSequence:
    sequence = EventSequence()
    for seq in range(count):
        sequence.applied(seq, float(seq))
    return sequence


def test_a_late_subscriber_sees_a_gap_from_the_beginning() -> None:
    sequence = EventSequence()
    assert sequence.judge(7, 1.0) is Verdict.GAP and sequence.missing_before(7) == 7


def test_the_same_batch_again_is_a_duplicate_and_the_same_number_later_a_restart() -> None:
    sequence = after(5)
    for seq in range(5):
        assert sequence.judge(seq, float(seq)) is Verdict.DUPLICATE
        assert sequence.judge(seq, 100.0) is Verdict.RESTART
        assert sequence.judge(seq, -100.0) is Verdict.RESTART, "a clock may have been set back"


def test_what_was_given_up_may_still_come_late() -> None:
    sequence = after(2)
    sequence.skipped_to(10)
    assert sequence.judge(10, 10.0) is Verdict.NEXT
    sequence.applied(10, 10.0)
    assert sequence.judge(5, 5.0) is Verdict.DUPLICATE


def test_memory_is_bounded_and_a_restart_is_seen_beyond_it() -> None:
    sequence = after(3 * REMEMBERED)
    assert sequence.judge(10, 10.0) is Verdict.DUPLICATE
    assert sequence.judge(0, 0.5) is Verdict.RESTART
    assert sequence.judge(3 * REMEMBERED - 1, 1e9) is Verdict.RESTART
    assert len(sequence._seen) == REMEMBERED


@given(
    lives=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    data=st.data(),
)
def test_any_losses_repeats_and_restarts_are_judged_right(lives: list[int], data: st.DataObject) -> None:
    """A publisher lives several times; of each life a subscriber gets some batches, some of them again."""
    sequence, clock, previous_life = EventSequence(), 0.0, False
    for batches in lives:
        times = [clock + 1.0 + seq for seq in range(batches)]
        clock = times[-1]
        got = [seq for seq in range(batches) if data.draw(st.booleans())]
        applied: set[int] = set()
        for seq in got:
            verdict = sequence.judge(seq, times[seq])
            if previous_life and seq >= sequence.next:
                return  # a restart whose first batches are all lost up to the old numbers cannot be seen
            if previous_life:
                assert verdict is Verdict.RESTART
                sequence.restarted()
                verdict = sequence.judge(seq, times[seq])
            previous_life = False
            missing = seq - (max(applied) + 1 if applied else 0)
            assert verdict is (Verdict.GAP if missing else Verdict.NEXT)
            assert sequence.missing_before(seq) == missing
            sequence.skipped_to(seq)
            sequence.applied(seq, times[seq])
            applied.add(seq)
            again = data.draw(st.sampled_from(sorted(applied)))
            assert sequence.judge(again, times[again]) is Verdict.DUPLICATE
        previous_life = previous_life or bool(applied)
