"""Many decode steps at once equal the same number of single steps, in everything one can see."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from tests.replica.caches import MAKERS, snapshot

SIZE = 4


def scheduler(blocks=40, enabled=True, kind="blocks", **limits):
    limits = {"max_running": 4, "max_batched_tokens": 16, "max_model_len": 128, **limits}
    cache = MAKERS[kind](blocks, SIZE, enabled=enabled, record_events=True)
    return Scheduler(cache, SchedulerLimits(**limits))


def request(name, ids, prompt_tokens, max_tokens, outputs=(), priority=0):
    return Sequence.of_blocks(
        name, ids, prompt_tokens, max_tokens, block_size=SIZE, output_block_ids=outputs, priority=priority
    )


def state(scheduler):
    """Everything that decides what happens next, and everything that was told."""
    return (
        [
            (s.request_id, s.status, s.output_tokens, s.computed_tokens, s.block_table, s.published_blocks)
            for s in scheduler.running + scheduler.waiting
        ],
        snapshot(scheduler.cache),
        scheduler.preemptions,
        scheduler.take_events(),
    )


def single_steps(scheduler, steps):
    finished = []
    for step in range(steps):
        assert not finished, f"a sequence finished {steps - step} steps before the end of the run"
        totals = scheduler.decode_batch()
        batch = scheduler.schedule()
        assert batch.prefill_tokens == 0 and batch.decode_sequences == totals.decode_sequences
        assert batch.decode_context_tokens == totals.decode_context_tokens
        finished = scheduler.commit(batch)
    return finished


def names(finished):
    return [sequence.request_id for sequence in finished]


def test_worked_example():
    s = scheduler()
    s.add(request("a", [1], 6, max_tokens=10))
    s.add(request("b", [2], 4, max_tokens=4))
    assert s.steps_until_change() == 0  # nothing runs
    s.commit(s.schedule())  # both prefill and have their first token
    assert s.steps_until_change() == 3  # b's last three
    assert s.decode_batch().decode_context_tokens == 7 + 5
    assert s.decode_batch(ahead=2).decode_context_tokens == 9 + 7
    assert names(s.advance_decodes(3)) == ["b"]
    assert s.steps_until_change() == 6
    s.add(request("c", [3], 6, max_tokens=1))
    assert s.steps_until_change() == 0  # c can be admitted


def test_a_run_ends_before_a_block_that_is_not_free():
    s = scheduler(blocks=4)
    s.add(request("a", [1], 4, max_tokens=10))
    s.add(request("b", [2], 4, max_tokens=10))
    s.commit(s.schedule())  # a block each, each needs its second now and its third after 4 more steps
    assert s.steps_until_change() == 4
    s.advance_decodes(4)
    assert s.steps_until_change() == 0
    assert s.schedule().decode_sequences == 1 and s.preemptions == 1


def test_who_cannot_be_admitted_does_not_stop_a_run():
    s = scheduler(blocks=6)
    s.add(request("a", [1], 4, max_tokens=16))
    s.commit(s.schedule())
    s.add(request("b", [2, 3, 4, 5, 6], 20, max_tokens=1))
    s.commit(s.schedule())
    assert names(s.waiting) == ["b"] and s.steps_until_change() == 14


def test_a_publication_that_may_let_somebody_in_ends_a_run():
    s = scheduler(blocks=7)
    s.add(request("a", [1], 4, max_tokens=16, outputs=[10, 11, 12]))
    s.add(request("c", [50], 5, max_tokens=12))
    s.commit(s.schedule())  # one block and two; 4 are free
    s.add(request("b", [1, 10, 11, 5, 6, 7], 24, max_tokens=1))  # 6 blocks, one of them a's: 5 more
    assert s.steps_until_change() == 4  # then block 10 is a's too


def test_tokens_must_be_sampled():
    s = scheduler()
    s.add(Sequence("a", [1, 2], 5))
    s.commit(s.schedule(), [1])
    with pytest.raises(ValueError, match="token ids"):
        s.advance_decodes(1)


def test_too_many_steps_are_refused():
    s = scheduler()
    s.add(request("a", range(5), 20, max_tokens=4))
    s.commit(s.schedule())  # 16 of 20
    with pytest.raises(ValueError, match="too many"):
        s.advance_decodes(1)
    s.commit(s.schedule())
    with pytest.raises(ValueError, match="too many"):
        s.advance_decodes(4)
    s.advance_decodes(3)
    assert not s.has_work


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    blocks=st.sampled_from([14, 20, 40]),
    enabled=st.booleans(),
    kind=st.sampled_from(sorted(MAKERS)),
    max_running=st.integers(1, 4),
    spare=st.integers(0, 3),
)
def test_a_run_equals_single_steps(seed, blocks, enabled, kind, max_running, spare):
    """Twins get the same requests and aborts; one runs decodes in one go, the other step by step."""
    rng = random.Random(seed)
    fast, slow = (
        scheduler(blocks, enabled, kind, max_running=max_running, spare_blocks=spare) for _ in range(2)
    )
    for number in range(12):
        for _ in range(rng.randrange(3)):
            first = rng.randrange(2)
            ids = [first, 10 + rng.randrange(2), 20 + rng.randrange(3)]
            outputs = [100 + 10 * rng.randrange(2) + i for i in range(rng.randrange(4))]
            prompt_tokens, max_tokens = rng.randrange(1, 14), rng.randrange(1, 40)
            options = (f"{number}.{rng.random()}", ids, prompt_tokens, max_tokens, outputs, rng.randrange(2))
            for one in (fast, slow):
                one.add(request(*options))
        if fast.running and rng.random() < 0.2:
            victim = rng.choice(fast.running).request_id
            for one in (fast, slow):
                one.abort(victim)
        for _ in range(rng.randrange(6)):
            steps = min(fast.steps_until_change(), rng.choice([1, 3, 100]))
            if steps:
                contexts = fast.decode_batch(ahead=steps - 1).decode_context_tokens
                done = names(fast.advance_decodes(steps))
                assert single_steps(slow, steps - 1) == []
                batch = slow.schedule()
                assert batch.decode_context_tokens == contexts
                assert names(slow.commit(batch)) == done
            else:
                batches = fast.schedule(), slow.schedule()
                rows = [[(w.sequence.request_id, w.start, w.count) for w in b.rows] for b in batches]
                assert rows[0] == rows[1]
                assert names(fast.commit(batches[0])) == names(slow.commit(batches[1]))
            fast.check_invariants()
            assert state(fast) == state(slow)
    for one in (fast, slow):
        for _ in range(10_000):
            if not one.has_work:
                break
            one.commit(one.schedule())
        assert one.cache.free_blocks == one.cache.blocks
