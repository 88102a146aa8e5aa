"""Options of the scheduler: checked tokens, chunk cap, longest prefix first, loads from other tiers."""

import doctest
import random

import pytest

from replica import admission_order, prefix_load, sampled_tokens, sequence
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence, Status
from tests.replica.caches import CACHES
from tests.replica.test_scheduler import add, names, pool_is_whole, rows
from tests.replica.toy_engine import ToyEngine, expected_output


@pytest.fixture(params=CACHES)
def engine(request):
    def make(tokens=256, **limits):
        limits = {"max_running": 8, "max_batched_tokens": 16, "max_model_len": 256, **limits}
        return ToyEngine(Scheduler(CACHES[request.param](tokens), SchedulerLimits(**limits)))

    return make


@pytest.mark.parametrize("documented", [admission_order, prefix_load, sampled_tokens, sequence])
def test_doctests(documented):
    assert doctest.testmod(documented).failed == 0


# What was sampled


def state(toy):
    return [
        (
            s.request_id,
            s.status,
            list(s.token_ids),
            s.computed_tokens,
            s.published_blocks,
            list(s.block_table),
        )
        for s in toy.scheduler.running + toy.scheduler.waiting
    ]


@pytest.mark.parametrize(
    ("sampled", "message"),
    [
        ({"a": 1}, "request b has token ids"),
        ({"b": 1}, "request a has token ids"),
        ({}, "has token ids"),
        (None, "has token ids"),
        ([1], "1 sampled tokens for 2 rows"),
        ([1, 2, 3], "3 sampled tokens for 2 rows"),
        ({"a": 1, "b": -1}, "request b: sampled -1"),
        ({"a": 2**31, "b": 1}, "request a: sampled 2147483648"),
        ({"a": 1, "b": 1.5}, "request b: sampled 1.5"),
        ({"a": 1, "b": None}, "request b: sampled None"),
        ({"a": 1, "b": 1, "stranger": 1}, r"\['stranger'\], which are not in this batch"),
    ],
)
def test_a_wrong_commit_changes_nothing_and_can_be_repeated(engine, sampled, message):
    toy = engine()
    add(toy, "a", range(50, 54), max_tokens=1)
    add(toy, "b", range(9), max_tokens=3)
    batch = toy.scheduler.schedule()
    right = toy.compute(batch)
    before = state(toy)
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            toy.scheduler.commit(batch, sampled)
        assert state(toy) == before
        toy.scheduler.check_invariants()
    assert names(toy.scheduler.commit(batch, right)) == ["a"]
    assert names(toy.drain()) == ["b"] and pool_is_whole(toy)


def test_a_wrong_commit_can_be_discarded(engine):
    toy = engine()
    a = add(toy, "a", range(9), max_tokens=3)
    batch = toy.scheduler.schedule()
    with pytest.raises(ValueError):
        toy.scheduler.commit(batch, {})
    toy.scheduler.discard(batch)
    toy.drain()
    assert a.output_ids == expected_output(list(range(9)), 3)


def test_tokens_of_requests_that_left_are_ignored_and_may_be_missing(engine):
    for sampled in ({"a": 5, "b": 6}, {"b": 6}, [5, 6]):
        toy = engine()
        a, b = add(toy, "a", [1, 2]), add(toy, "b", [3, 4])
        batch = toy.scheduler.schedule()
        toy.scheduler.abort("a")
        toy.scheduler.commit(batch, sampled)
        assert a.output_ids == [] and b.output_ids == [6]


def test_numbers_of_other_libraries_become_plain_ones(engine):
    class Number:
        def __index__(self):
            return 5

    toy = engine()
    a = add(toy, "a", [1, 2])
    toy.scheduler.commit(toy.scheduler.schedule(), [Number()])
    assert a.output_ids == [5] and type(a.token_ids[-1]) is int


# Chunks


def test_a_chunk_cap_lets_prefills_share_a_step(engine):
    toy = engine(max_chunk_tokens=6)
    for name, size in (("a", 14), ("b", 14), ("c", 3)):
        add(toy, name, [ord(name)] * size, max_tokens=1)
    seen = []
    while toy.scheduler.has_work:
        batch = toy.scheduler.schedule()
        toy.check(batch)
        seen.append(rows(batch))
        toy.scheduler.commit(batch, toy.compute(batch))
    assert seen == [
        [("a", 0, 6), ("b", 0, 6), ("c", 0, 3)],
        [("a", 6, 6), ("b", 6, 6)],
        [("a", 12, 2), ("b", 12, 2)],
    ]


def test_without_a_cap_the_first_takes_the_budget(engine):
    toy = engine()
    for name in "ab":
        add(toy, name, [ord(name)] * 14, max_tokens=1)
    assert rows(toy.scheduler.schedule()) == [("a", 0, 14), ("b", 0, 2)]


@pytest.mark.parametrize(
    "limits", [{"max_chunk_tokens": 0}, {"max_overtaken": -1}, {"pinned_blocks": -1}], ids=str
)
def test_senseless_options_are_refused(limits):
    with pytest.raises(ValueError, match=next(iter(limits))):
        SchedulerLimits(**limits)


# In-batch sharing, with every cache


def test_sixteen_identical_prompts_compute_their_prefix_once(engine):
    toy = engine(tokens=512, max_running=16, max_batched_tokens=64)
    prompt = list(range(20))
    sequences = [add(toy, f"{number}", prompt, max_tokens=3) for number in range(16)]
    toy.drain()
    own = 20 - sequences[1].cached_tokens  # the block, or page, of the last token
    assert own == toy.scheduler.cache.block_size
    assert toy.computed_positions == 20 + 15 * own + 16 * 2
    assert all(s.output_ids == expected_output(prompt, 3) for s in sequences) and pool_is_whole(toy)


# Longest prefix first


def warm(toy, prompt):
    add(toy, "warm", prompt, max_tokens=1)
    toy.drain()


def test_the_longest_prefix_goes_first_within_a_priority(engine):
    toy = engine(longest_prefix_first=True, max_running=1)
    warm(toy, range(40))
    add(toy, "cold", [99] * 10, max_tokens=1)
    add(toy, "half", [*range(20), 99], max_tokens=1)
    add(toy, "most", [*range(36), 99], max_tokens=1)
    add(toy, "urgent", [98] * 10, max_tokens=1, priority=-1)
    add(toy, "later", [*range(36), 98], max_tokens=1, priority=1)
    assert names(toy.drain()) == ["urgent", "most", "half", "cold", "later"]


def test_by_default_arrival_decides(engine):
    toy = engine(max_running=1)
    warm(toy, range(40))
    add(toy, "cold", [99] * 10, max_tokens=1)
    add(toy, "most", [*range(36), 99], max_tokens=1)
    assert names(toy.drain()) == ["cold", "most"]


@pytest.mark.parametrize("bound", [0, 1, 2, 5])
def test_nobody_is_overtaken_more_often_than_the_bound(engine, bound):
    toy = engine(longest_prefix_first=True, max_running=1, max_overtaken=bound)
    warm(toy, range(40))
    cold = add(toy, "cold", [99] * 10, max_tokens=1)
    for number in range(30):  # there is always somebody warm who came later
        add(toy, f"warm{number}", [*range(36), 50 + number], max_tokens=1)
        toy.step()
        if cold.status is Status.FINISHED:
            break
    assert number == bound and cold.overtaken == bound


def test_the_bound_holds_for_everybody_in_random_traffic(engine):
    rng = random.Random(2)
    toy = engine(tokens=128, longest_prefix_first=True, max_running=2, max_overtaken=3)
    admitted: list[str] = []
    waits: list[Sequence] = []
    for number in range(300):
        stem = list(range(rng.choice([0, 8, 24])))
        waits.append(add(toy, f"{number}", [*stem, 1_000 + number, 7, 7, 7], max_tokens=rng.randrange(1, 4)))
        batch = toy.scheduler.schedule()
        admitted += [
            row.sequence.request_id for row in batch.prefills if row.start == row.sequence.cached_tokens
        ]
        toy.scheduler.commit(batch, toy.compute(batch))
        toy.scheduler.check_invariants()
    toy.drain()
    assert max(sequence.overtaken for sequence in waits) == 3
    order = [int(name) for name in dict.fromkeys(admitted)]
    assert order != sorted(order)
    for place, number in enumerate(order):
        passed = sum(1 for other in order[:place] if other > number)
        assert passed <= 3 + waits[number].deferrals * 2, number
    assert pool_is_whole(toy)


def test_a_request_without_room_is_not_overtaken_by_a_warmer_one_for_ever(engine):
    toy = engine(tokens=64, longest_prefix_first=True, max_overtaken=1)
    warm(toy, range(16))
    add(toy, "big", [99] * 40, max_tokens=20)
    toy.step()
    toy.step()
    large = add(toy, "large", [98] * 30, max_tokens=1)  # does not fit beside big
    for number in range(12):
        add(toy, f"warm{number}", [*range(12), number], max_tokens=1)
        toy.step()
    assert large.status is Status.WAITING and large.overtaken == 1
    assert names(toy.scheduler.waiting)[0] == "large"
    finished = names(toy.drain())
    assert finished.index("large") < finished.index("warm11")


def test_runs_of_decodes_stop_while_somebody_waits():
    """Who is first may change with every block taken, so the simulator asks at every step."""
    scheduler = Scheduler(
        CACHES["blocks"](64), SchedulerLimits(max_running=4, max_batched_tokens=16, longest_prefix_first=True)
    )
    for name, ids, tokens, most in (("a", [1], 4, 40), ("b", [2] * 9, 36, 1)):
        scheduler.add(Sequence.of_blocks(name, ids, tokens, most, block_size=4))
    scheduler.commit(scheduler.schedule())
    while any(sequence.prefilling for sequence in scheduler.running):
        scheduler.commit(scheduler.schedule())
    scheduler.add(Sequence.of_blocks("c", [3] * 14, 56, 1, block_size=4))
    assert names(scheduler.running) == ["a"] and scheduler.steps_until_change() == 0


# Loads


def test_a_loaded_prefix_is_hit_and_not_computed(engine):
    toy = engine()
    prompt = list(range(30))
    waiting = Sequence("a", prompt, 3)
    load = toy.scheduler.loads.begin(waiting, 24)
    assert load is not None and (load.start, load.stop) == (0, 24)
    other = add(toy, "other", [*range(8), 99], max_tokens=2)
    toy.step()
    assert other.cached_tokens == 0  # nothing has arrived yet
    toy.fill(load, 24)
    toy.scheduler.loads.arrived(load, 24)
    toy.scheduler.check_invariants()
    toy.scheduler.add(waiting)
    toy.scheduler.loads.end(load)
    toy.drain()
    assert waiting.cached_tokens == 24 and waiting.output_ids == expected_output(prompt, 3)
    assert pool_is_whole(toy)


def test_a_load_that_stops_half_way_leaves_what_arrived(engine):
    toy = engine()
    waiting = Sequence("a", list(range(30)), 3)
    load = toy.scheduler.loads.begin(waiting, 24)
    toy.fill(load, 8)
    toy.scheduler.loads.arrived(load, 8)
    for wrong in (4, 28):
        with pytest.raises(ValueError, match="in order"):
            toy.scheduler.loads.arrived(load, wrong)
    toy.scheduler.loads.end(load)
    with pytest.raises(ValueError, match="in flight"):
        toy.scheduler.loads.arrived(load, 12)
    toy.scheduler.add(waiting)
    toy.drain()
    assert waiting.cached_tokens == 8 and pool_is_whole(toy)


def test_a_load_takes_only_what_is_missing_and_only_if_there_is_room(engine):
    toy = engine(tokens=64)
    warm(toy, range(20))
    loads = toy.scheduler.loads
    load = loads.begin(Sequence("a", list(range(60)), 3), 40)
    assert load.start == 20 and len(load.blocks) * toy.scheduler.cache.block_size == 20
    free = toy.scheduler.cache.free_blocks
    assert loads.begin(Sequence("b", [9] * 60, 3), 40) is None and toy.scheduler.cache.free_blocks == free
    assert loads.begin(Sequence("c", [9] * 3, 3), 40) is None  # longer than the prompt
    assert toy.scheduler.reset_cache(preempt_running=True) is False
    toy.scheduler.check_invariants()
    loads.end(load)
    assert len(loads) == 0 and pool_is_whole(toy) and toy.scheduler.reset_cache()


def test_memory_that_is_being_loaded_is_waited_for(engine):
    toy = engine(tokens=32)
    load = toy.scheduler.loads.begin(Sequence("a", list(range(30)), 1), 24)
    b = add(toy, "b", [9] * 20, max_tokens=1)
    assert toy.scheduler.schedule().empty and toy.scheduler.has_work
    toy.scheduler.loads.end(load)
    assert toy.drain() == [b]
