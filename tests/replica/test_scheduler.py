"""The scheduler: order, budget, admission, preemption, refusal, ends of all kinds."""

import doctest
import random

import pytest

from replica import scheduler as module
from replica.kv_cache.prefix_cache import PrefixCache
from replica.scheduler import RequestTooLong, Scheduler, SchedulerLimits
from replica.sequence import Sequence, Status
from tests.replica.toy_engine import ToyEngine, expected_output


def engine(blocks=64, block_size=4, enabled=True, **limits):
    limits = {"max_running": 8, "max_batched_tokens": 16, "max_model_len": 256, **limits}
    cache = PrefixCache(blocks, block_size, enabled=enabled)
    return ToyEngine(Scheduler(cache, SchedulerLimits(**limits)))


def add(toy, name, prompt, max_tokens=4, **options):
    sequence = Sequence(name, prompt, max_tokens, **options)
    toy.scheduler.add(sequence)
    return sequence


def rows(batch):
    return [(row.sequence.request_id, row.start, row.count) for row in batch.rows]


def names(queue):
    return [sequence.request_id for sequence in queue]


def pool_is_whole(toy):
    toy.scheduler.check_invariants()
    return toy.scheduler.cache.free_blocks == toy.scheduler.cache.blocks


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_a_long_prompt_is_cut_into_chunks_beside_decodes():
    toy = engine(max_batched_tokens=8)
    add(toy, "a", [1, 2], max_tokens=5)
    toy.step()
    add(toy, "b", range(20))
    seen = []
    for _ in range(4):
        batch = toy.scheduler.schedule()
        seen.append(rows(batch))
        toy.check(batch)
        toy.scheduler.commit(batch, toy.compute(batch))
    assert seen == [
        [("a", 2, 1), ("b", 0, 7)],
        [("a", 3, 1), ("b", 7, 7)],
        [("a", 4, 1), ("b", 14, 6)],
        [("a", 5, 1), ("b", 20, 1)],
    ]


def test_batch_totals():
    toy = engine()
    add(toy, "a", [1, 2, 3])
    toy.step()
    add(toy, "b", range(10))
    batch = toy.scheduler.schedule()
    assert (batch.decode_sequences, batch.decode_context_tokens, batch.prefill_tokens) == (1, 4, 10)
    assert rows(batch)[1:] == [(row.sequence.request_id, row.start, row.count) for row in batch.prefills]
    assert batch.tokens == 11 and not batch.empty


def test_waiting_order_is_priority_then_arrival():
    toy = engine(max_running=2)
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 0)):
        add(toy, name, [ord(name)], priority=priority)
    assert names(toy.scheduler.waiting) == ["c", "a", "d", "b"]
    assert rows(toy.scheduler.schedule()) == [("c", 0, 1), ("a", 0, 1)]


def test_a_large_request_is_not_overtaken():
    toy = engine(blocks=10)
    add(toy, "first", range(20), max_tokens=12)
    toy.step()
    add(toy, "large", range(100, 124), max_tokens=4)
    add(toy, "small", [9], max_tokens=1)
    toy.step()
    assert names(toy.scheduler.waiting) == ["large", "small"]
    assert names(toy.drain()) == ["first", "small", "large"]


def test_spare_blocks_stay_free_unless_nothing_runs():
    toy = engine(blocks=10, spare_blocks=6)
    add(toy, "a", range(20))  # 5 blocks of 10: no 6 left, but nothing runs
    toy.step()
    add(toy, "b", [1])
    toy.step()
    assert names(toy.scheduler.running) == ["a"]
    assert names(toy.drain()) == ["a", "b"]


def test_preemption_takes_the_least_urgent_and_the_latest_of_them():
    toy = engine(blocks=7)
    for name, priority in (("a", 0), ("b", 1), ("c", 1), ("d", 0)):
        add(toy, name, [ord(name)] * 3, max_tokens=12, priority=priority)
    toy.step()
    assert names(toy.scheduler.running) == ["a", "d", "b", "c"]
    toy.step()  # position 3: still in the first block
    toy.step()  # three blocks are left for four sequences
    assert names(toy.scheduler.running) == ["a", "d", "b"]
    assert toy.scheduler.preemptions == 1
    (victim,) = toy.scheduler.waiting
    assert (victim.request_id, victim.status, victim.block_table) == ("c", Status.PREEMPTED, [])
    assert victim.output_tokens == 2  # its answer so far is kept
    finished = toy.drain()
    for sequence in finished:
        assert sequence.output_ids == expected_output([ord(sequence.request_id)] * 3, 12)
    assert len(finished) == 4 and pool_is_whole(toy)


def test_a_preempted_sequence_comes_before_later_arrivals():
    toy = engine(blocks=4, max_running=2)
    add(toy, "a", [1, 1, 1], max_tokens=10)
    add(toy, "b", [2, 2, 2], max_tokens=10)
    add(toy, "late", [3], max_tokens=1)
    while not toy.scheduler.preemptions:
        toy.step()
    assert names(toy.scheduler.waiting) == ["b", "late"]
    while "a" in names(toy.scheduler.running):
        toy.step()
    assert [row[0] for row in rows(toy.scheduler.schedule())] == ["b", "late"]


def test_cached_tokens_are_not_inflated_by_recomputation():
    toy = engine(blocks=6)
    add(toy, "a", [1] * 8, max_tokens=12)
    toy.step()
    victim = add(toy, "b", [2] * 7, max_tokens=12)
    finished = toy.drain()
    assert victim.preemptions > 0 and len(finished) == 2
    assert victim.cached_tokens == 0
    counters = toy.scheduler.cache.counters
    assert (counters.queried_tokens, counters.hit_tokens) == (15, 0)
    assert counters.resumed_queried_tokens > 0


@pytest.mark.parametrize(
    ("prompt_tokens", "max_tokens", "limit_tokens", "limit_name"),
    [(250, 7, 256, "max_model_len"), (200, 42, 241, "KV pool")],
)
def test_b011_what_can_never_fit_is_refused_with_numbers(prompt_tokens, max_tokens, limit_tokens, limit_name):
    toy = engine(blocks=60)
    with pytest.raises(RequestTooLong) as refusal:
        add(toy, "a", [1] * prompt_tokens, max_tokens)
    error = refusal.value
    assert (error.limit_tokens, error.limit_name) == (limit_tokens, limit_name)
    assert (error.prompt_tokens, error.max_tokens) == (prompt_tokens, max_tokens)
    for number in (prompt_tokens, max_tokens, prompt_tokens + max_tokens, limit_tokens):
        assert str(number) in str(error)
    assert not toy.scheduler.has_work


def test_b011_the_largest_that_fits_does_fit():
    toy = engine(blocks=60, max_batched_tokens=64)
    sequence = add(toy, "a", [1] * 200, 41)
    assert toy.drain() == [sequence] and sequence.output_tokens == 41
    assert toy.scheduler.preemptions == 0


def test_b011_two_large_growing_requests_and_five_small_ones():
    toy = engine(blocks=64, max_batched_tokens=64)
    for name in ("big1", "big2"):
        add(toy, name, [ord(name[3])] * 160, max_tokens=40)
    for name in "abcde":
        add(toy, name, [ord(name)] * 5, max_tokens=6)
    finished = toy.drain()
    assert len(finished) == 7 and all(s.output_tokens == s.max_tokens for s in finished)
    assert pool_is_whole(toy)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompt": []}, "must be at least 1"),
        ({"max_tokens": 0}, "must be at least 1"),
        ({"name": "there"}, "is in use"),
    ],
)
def test_senseless_requests_are_refused(change, message):
    toy = engine()
    add(toy, "there", [1])
    with pytest.raises(ValueError, match=message):
        add(toy, **{"name": "new", "prompt": [1], "max_tokens": 1, **change})
    assert names(toy.scheduler.waiting) == ["there"]


def test_b127_block_ids_of_another_block_size_are_refused():
    toy = engine(block_size=4)
    with pytest.raises(ValueError, match="blocks of 8 tokens, the cache has blocks of 4"):
        toy.scheduler.add(Sequence.of_blocks("a", [1, 2], 16, 1, block_size=8))


def test_a_used_sequence_is_refused_and_its_request_id_is_free_again():
    toy = engine()
    sequence = add(toy, "a", [1], max_tokens=1)
    toy.drain()
    with pytest.raises(ValueError, match="make a new Sequence"):
        toy.scheduler.add(sequence)
    add(toy, "a", [1], max_tokens=1)


@pytest.mark.parametrize(
    "limits",
    [
        {"max_running": 0},
        {"max_running": 9, "max_batched_tokens": 8},
        {"max_model_len": 1},
        {"spare_blocks": -1},
    ],
)
def test_senseless_limits_are_refused(limits):
    with pytest.raises(ValueError):
        SchedulerLimits(**limits)


def test_sampled_tokens_by_name_or_in_order():
    for give in (lambda tokens: tokens, lambda tokens: list(tokens.values())):
        toy = engine(max_batched_tokens=8)
        a = add(toy, "a", [1, 2])
        b = add(toy, "b", [3] * 7)  # its last token does not fit in the first step
        for _ in range(2):
            batch = toy.scheduler.schedule()
            toy.scheduler.commit(batch, give(toy.compute(batch)))
        assert a.output_ids == expected_output([1, 2], 2) and b.output_ids == expected_output([3] * 7, 1)


def test_too_few_or_no_sampled_tokens_are_an_error():
    for sampled in ([], None):
        toy = engine()
        add(toy, "a", [1])
        with pytest.raises(ValueError):
            toy.scheduler.commit(toy.scheduler.schedule(), sampled)


def test_one_batch_in_flight():
    toy = engine()
    add(toy, "a", [1])
    batch = toy.scheduler.schedule()
    for forbidden in (
        toy.scheduler.schedule,
        toy.scheduler.steps_until_change,
        lambda: toy.scheduler.commit(toy.scheduler.decode_batch()),
    ):
        with pytest.raises(RuntimeError, match="flight"):
            forbidden()
    toy.scheduler.commit(batch, [1])
    with pytest.raises(RuntimeError, match="flight"):
        toy.scheduler.commit(batch, [1])


def test_an_idle_scheduler_gives_empty_batches():
    toy = engine()
    for _ in range(2):
        batch = toy.scheduler.schedule()
        assert batch.empty and toy.scheduler.commit(batch) == []


def test_a_discarded_step_is_computed_again():
    toy = engine()
    a = add(toy, "a", range(10))
    toy.scheduler.discard(toy.scheduler.schedule())
    toy.scheduler.check_invariants()
    assert a.computed_tokens == 0
    toy.drain()
    assert a.output_ids == expected_output(list(range(10)), 4)


def test_abort_waiting_running_in_flight_and_unknown():
    toy = engine(max_running=2)
    a, b, c = (add(toy, name, [ord(name)] * 6) for name in "abc")
    toy.step()
    assert toy.scheduler.abort("c") is c and c.status is Status.FINISHED and c.finish_reason == "abort"
    assert toy.scheduler.abort("a") is a and a.block_table == []
    batch = toy.scheduler.schedule()
    assert toy.scheduler.abort("b") is b
    assert toy.scheduler.commit(batch, {"b": 1}) == []
    assert b.output_tokens == 1 and toy.scheduler.abort("b") is None and toy.scheduler.abort("x") is None
    assert not toy.scheduler.has_work and pool_is_whole(toy)


def test_finishing_is_the_engines_word_and_counts_once():
    toy = engine()
    a = add(toy, "a", [1], max_tokens=50)
    toy.step()
    toy.scheduler.finish(a, "stop")
    toy.scheduler.finish(a, "length")
    assert (a.finish_reason, a.output_tokens) == ("stop", 1) and pool_is_whole(toy)
    b = add(toy, "b", [1], max_tokens=1)
    assert toy.drain() == [b] and b.finish_reason == "length"


def test_b015_abort_of_the_first_of_many_leaves_no_half_filled_block():
    toy = engine(max_batched_tokens=8, max_running=8)
    prompt = list(range(30))
    sequences = [add(toy, str(i), prompt) for i in range(6)]
    batch = toy.scheduler.schedule()
    assert rows(batch) == [("0", 0, 8)]
    toy.scheduler.abort("0")  # before its prefill ran
    toy.scheduler.commit(batch, {})
    assert not list(toy.scheduler.cache.pool.cached_keys)
    toy.step()  # another one starts, gets 8 tokens far
    toy.scheduler.abort("1")
    assert len(list(toy.scheduler.cache.pool.cached_keys)) == 2
    finished = toy.drain()
    assert finished == sequences[2:]
    assert all(sequence.output_ids == expected_output(prompt, 4) for sequence in finished)
    assert pool_is_whole(toy)


def test_b058_many_aborts_leak_nothing():
    rng = random.Random(5)
    toy = engine(blocks=24, max_batched_tokens=24)
    for number in range(400):
        shared = [rng.randrange(2)] * rng.randrange(12)
        add(
            toy,
            str(number),
            [*shared, *[rng.randrange(7) for _ in range(rng.randrange(1, 9))]],
            rng.randrange(1, 9),
        )
        if rng.random() < 0.3:
            toy.scheduler.abort(str(rng.randrange(number + 1)))
        toy.step()
    toy.drain()
    assert pool_is_whole(toy)
    last = add(toy, "whole pool", [1] * 90, max_tokens=7)
    assert toy.drain() == [last]


def test_b067_the_match_is_taken_at_admission_and_counted_once():
    toy = engine(blocks=8)
    add(toy, "a", [1] * 9, max_tokens=1)
    toy.drain()
    add(toy, "hold", [2] * 20, max_tokens=8)  # 5 blocks, grows over what a left
    toy.step()
    waits = add(toy, "b", [*[1] * 8, *[3] * 8], max_tokens=2)
    for _ in range(3):
        toy.step()
        assert waits.status is Status.WAITING and waits.cached_tokens == 0
    toy.drain()
    assert waits.output_ids == expected_output([*[1] * 8, *[3] * 8], 2)
    assert toy.scheduler.load().prefix_queried_tokens == 9 + 20 + 16


def test_m12_reset_with_and_without_running_requests():
    prompts = {name: [ord(name)] * 9 for name in "abc"}
    toy = engine()
    sequences = [add(toy, name, prompt, max_tokens=8) for name, prompt in prompts.items()]
    for _ in range(4):
        toy.step()
    assert toy.scheduler.reset_cache() is False
    batch = toy.scheduler.schedule()
    toy.compute(batch)
    assert toy.scheduler.reset_cache(preempt_running=True) is True
    assert toy.scheduler.commit(batch, dict.fromkeys(prompts, 99)) == []  # dropped
    assert names(toy.scheduler.waiting) == ["a", "b", "c"] and not list(toy.scheduler.cache.pool.cached_keys)
    toy.scheduler.check_invariants()
    toy.drain()
    for sequence in sequences:
        assert sequence.output_ids == expected_output(prompts[sequence.request_id], 8)


def test_load_report():
    toy = engine(blocks=10, max_running=1)
    add(toy, "a", range(8), max_tokens=3)
    add(toy, "b", range(9), max_tokens=3)
    toy.step()
    load = toy.scheduler.load()
    assert (load.running, load.waiting, load.kv_usage) == (1, 1, pytest.approx(0.2))
    assert (load.capacity_tokens, load.block_size) == (40, 4)
    assert (load.prefix_queried_tokens, load.prefix_hit_tokens) == (8, 0)
    toy.drain()
    load = toy.scheduler.load()
    assert (load.running, load.waiting, load.kv_usage) == (0, 0, 0.0)
    assert (load.prefix_queried_tokens, load.prefix_hit_tokens) == (17, 8)


def test_decodes_never_starve_a_prefill():
    toy = engine(max_running=4, max_batched_tokens=4)
    for name in "abc":
        add(toy, name, [ord(name)], max_tokens=40)
    toy.step()
    long = add(toy, "long", range(20), max_tokens=1)
    for _ in range(21):
        toy.step()
    assert long.status is Status.FINISHED


def test_with_the_cache_off_everything_is_computed():
    outputs = []
    for enabled in (True, False):
        toy = engine(enabled=enabled)
        first, second = add(toy, "a", range(12)), add(toy, "b", range(12))
        toy.drain()
        outputs.append((first.output_ids, second.output_ids))
        assert second.cached_tokens == (8 if enabled else 0)
        assert toy.computed_positions == 12 + 3 + (4 if enabled else 12) + 3
    assert outputs[0] == outputs[1] and outputs[0][0] == outputs[0][1]


def test_check_invariants_finds_damage():
    def damaged(damage):
        toy = engine(max_running=2)
        for name in "abc":
            add(toy, name, [ord(name)] * 6)
        toy.step()
        damage(toy.scheduler, *toy.scheduler.running)
        with pytest.raises(AssertionError):
            toy.scheduler.check_invariants()

    damaged(lambda scheduler, a, b: scheduler.running.reverse())
    damaged(lambda scheduler, a, b: scheduler.running.remove(b))
    damaged(lambda scheduler, a, b: scheduler.waiting.append(a))
    damaged(lambda scheduler, a, b: setattr(a, "status", Status.WAITING))
    damaged(lambda scheduler, a, b: setattr(a, "computed_tokens", 5))
    damaged(lambda scheduler, a, b: a.block_table.append(b.block_table[0]))
    damaged(lambda scheduler, a, b: scheduler.cache.release(b))
