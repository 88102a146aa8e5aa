"""In-batch sharing: one cold prefix that arrives many times at once is computed once, and nobody starves."""

from replica.prefix_sharing import MAX_DEFERRALS
from replica.sequence import Sequence, Status
from tests.replica.test_scheduler import add, engine, names, pool_is_whole, rows
from tests.replica.toy_engine import expected_output

PREFIX = list(range(20))


def test_sixteen_identical_prompts_compute_their_prefix_once():
    toy = engine(blocks=200, max_running=16, max_batched_tokens=64)
    sequences = [add(toy, str(number), PREFIX, max_tokens=3) for number in range(16)]
    assert rows(toy.scheduler.schedule()) == [("0", 0, 20)]
    toy.scheduler.discard(toy.scheduler._in_flight)
    toy.drain()
    # 4 of 5 blocks are shared (last-token rule); each computes its last block and 2 of its 3 output tokens.
    assert toy.computed_positions == 16 + 16 * (4 + 2)
    assert [s.cached_tokens for s in sequences] == [0] + [16] * 15
    assert all(s.output_ids == expected_output(PREFIX, 3) for s in sequences)
    assert pool_is_whole(toy)


def test_without_sharing_each_computes_its_own():
    toy = engine(max_batched_tokens=64, shares_prefills=False)
    sequences = [add(toy, str(number), PREFIX, max_tokens=3) for number in range(3)]
    assert rows(toy.scheduler.schedule()) == [("0", 0, 20), ("1", 0, 20), ("2", 0, 20)]
    toy.scheduler.discard(toy.scheduler._in_flight)
    toy.drain()
    assert all(s.output_ids == expected_output(PREFIX, 3) and not s.cached_tokens for s in sequences)
    assert pool_is_whole(toy)


def test_a_different_prompt_passes_those_who_wait():
    toy = engine(max_batched_tokens=64)
    for name, prompt in (("a", PREFIX), ("b", [*PREFIX, 1]), ("other", [5, 6])):
        add(toy, name, prompt)
    batch = toy.scheduler.schedule()
    assert rows(batch) == [("a", 0, 20), ("other", 0, 2)]
    toy.scheduler.commit(batch, toy.compute(batch))
    assert rows(toy.scheduler.schedule())[-1] == ("b", 20, 1)


def test_the_wait_is_for_the_common_part_only():
    toy = engine(max_batched_tokens=16)
    add(toy, "a", range(30), max_tokens=2)
    b = add(toy, "b", [*range(25), 99, 99, 99, 99, 99], max_tokens=1)
    toy.step()  # a: 16 of 30, nothing left for b
    batch = toy.scheduler.schedule()  # a: the other 14; b would have 2 tokens, but a computes its fifth block
    assert rows(batch) == [("a", 16, 14)] and b.deferrals == 1
    toy.scheduler.commit(batch, toy.compute(batch))
    assert rows(toy.scheduler.schedule()) == [("a", 30, 1), ("b", 24, 6)]
    assert b.cached_tokens == 24


def test_a_wait_ends_when_the_owner_is_aborted():
    toy = engine(max_batched_tokens=64)
    add(toy, "a", PREFIX)
    b = add(toy, "b", PREFIX)
    batch = toy.scheduler.schedule()
    assert rows(batch) == [("a", 0, 20)]
    toy.scheduler.abort("a")
    toy.scheduler.commit(batch, {})
    assert rows(toy.scheduler.schedule()) == [("b", 0, 20)] and b.cached_tokens == 0


def test_nobody_waits_for_a_less_urgent_prefill():
    for priority, runs in ((0, True), (5, False)):
        toy = engine(max_batched_tokens=24)
        add(toy, "slow", range(40), priority=5)
        toy.step()  # 24 of 40; in the next step 8 tokens are left for others
        late = add(toy, "late", [*range(36), 1], priority=priority)
        toy.step()
        assert (late.status is Status.RUNNING) is runs


def test_nobody_waits_for_the_block_of_its_own_last_token():
    toy = engine(max_batched_tokens=64)
    add(toy, "a", range(4))
    add(toy, "b", range(4))
    assert rows(toy.scheduler.schedule()) == [("a", 0, 4), ("b", 0, 4)]


def test_the_owners_last_block_is_waited_for_when_it_will_be_full():
    toy = engine(max_batched_tokens=64)
    add(toy, "warm", [*range(16), 9], max_tokens=1)
    toy.drain()
    add(toy, "a", PREFIX)  # hits 16 tokens, computes its fifth and last block
    add(toy, "b", [*PREFIX, 1])
    assert rows(toy.scheduler.schedule()) == [("a", 16, 4)]


def test_opaque_ids_wait_by_the_same_rules():
    for prompt_tokens, waits in ((8, False), (9, True)):
        toy = engine(max_batched_tokens=64)
        for name, tokens in (("warm", 5), ("a", 8), ("b", prompt_tokens)):
            toy.scheduler.add(Sequence.of_blocks(name, [1, 2], tokens, 1, block_size=4))
            if name == "warm":
                toy.scheduler.commit(toy.scheduler.schedule())
        # Block 2 is missing; whether b can use it depends on where b's last token stands.
        assert (len(rows(toy.scheduler.schedule())) == 1) is waits


def test_who_does_not_read_the_cache_does_not_wait():
    toy = engine(max_batched_tokens=64)
    add(toy, "a", PREFIX)
    add(toy, "b", PREFIX, reads_cache=False)
    assert len(rows(toy.scheduler.schedule())) == 2
    off = engine(max_batched_tokens=64, enabled=False)
    add(off, "a", PREFIX)
    add(off, "b", PREFIX)
    assert len(rows(off.scheduler.schedule())) == 2


def test_salted_twins_do_not_wait_for_each_other():
    toy = engine(max_batched_tokens=64)
    add(toy, "a", PREFIX, salt="one")
    add(toy, "b", PREFIX, salt="two")
    assert len(rows(toy.scheduler.schedule())) == 2


def test_a_storm_of_aborted_owners_cannot_starve_a_request():
    toy = engine(max_batched_tokens=64, max_running=2)
    waits = add(toy, "waits", PREFIX, priority=1)
    for number in range(3 * MAX_DEFERRALS):
        add(toy, str(number), PREFIX, priority=0)  # more urgent: passes, starts, dies without a block
        batch = toy.scheduler.schedule()
        if "waits" in names(toy.scheduler.running):
            break
        toy.scheduler.abort(str(number))
        toy.scheduler.commit(batch, {})
    assert waits.status is Status.RUNNING and number == MAX_DEFERRALS
