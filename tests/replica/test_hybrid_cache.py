"""KV and recurrent states together: restart boundaries that every layer can restore, and nothing else."""

import doctest
import random

import pytest

from replica.kv_cache import hybrid_cache as module
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from replica.kv_cache.state_checkpoints import StateCheckpoints, StateInventory
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from tests.replica.test_scheduler import add, names
from tests.replica.toy_engine import ToyEngine, expected_output

KINDS = {
    "blocks": lambda tokens: PrefixCache(tokens // 4, 4),
    "radix": lambda tokens: RadixCache(tokens // 4, 4),
    "radix_token": lambda tokens: RadixCache(tokens, 1, event_block_size=4),
}


@pytest.fixture(params=KINDS)
def engine(request):
    def make(tokens=256, slots=16, limits=None, **options):
        cache = HybridCache(KINDS[request.param](tokens), StateCheckpoints(slots), **options)
        shape = {"max_running": 4, "max_batched_tokens": 16, "max_model_len": 200, **(limits or {})}
        return ToyEngine(Scheduler(cache, SchedulerLimits(**shape)))

    return make


def ask(toy, name, prompt, max_tokens=1):
    """Run it alone; cached tokens. Its output is checked."""
    sequence = add(toy, name, prompt, max_tokens)
    toy.drain()
    assert sequence.output_ids == expected_output(list(prompt), max_tokens)
    return sequence.cached_tokens


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("tokens", [5, 8, 9, 16, 17, 30, 64])
def test_the_same_prompt_restarts_at_its_last_boundary(engine, tokens):
    """Fully cached and yet a boundary is lost: the last token is computed. Chunks of 16 are on the way."""
    toy = engine()
    assert ask(toy, "cold", range(tokens)) == 0
    assert ask(toy, "warm", range(tokens)) == (tokens - 1) // 4 * 4 > 0


@pytest.mark.parametrize("tokens", [8, 11, 12, 30])
def test_a_longer_prompt_goes_on_where_the_shorter_one_ended(engine, tokens):
    toy = engine()
    ask(toy, "turn 1", range(tokens))
    assert ask(toy, "turn 2", [*range(tokens), *range(500, 520)]) == tokens // 4 * 4


def test_generated_tokens_are_gone_on_from_too(engine):
    toy = engine()
    answer = expected_output(list(range(10)), 13)
    ask(toy, "turn 1", range(10), max_tokens=13)  # 22 tokens computed: states at 8 and then at 12, 16, 20
    states = toy.scheduler.cache.states
    assert states.inventory() == StateInventory(0, 2, 14)  # 8, and the newest of the others
    assert ask(toy, "turn 2", [*range(10), *answer, 1, 2, 3]) == 20


def test_kv_without_state_is_no_hit_but_a_branch_point_is_remembered(engine):
    toy = engine()
    ask(toy, "a", [*range(20), *range(60, 68)])  # states at 24 and 28
    branch = [*range(20), 9, 9, 9]
    cache = toy.scheduler.cache
    found = cache.match(Sequence("b", branch, 1))
    assert len(found) == 0 and found.kv_tokens == 20
    assert ask(toy, "b", branch) == 0
    assert ask(toy, "c", [*range(20), 8, 8]) == 20  # the state at 20 was kept for it


def test_a_state_without_kv_is_no_hit(engine):
    toy = engine(tokens=64)
    ask(toy, "a", range(20))
    for number in range(4):
        ask(toy, f"{number}", [50 + number] * 60)
    assert toy.scheduler.cache.states.inventory().checkpoints > 1
    assert ask(toy, "a again", range(20)) == 0
    assert ask(toy, "and again", range(20)) == 16


def test_states_every_interval(engine):
    toy = engine(interval=8)
    ask(toy, "a", range(40))
    for shared in (39, 20, 9, 7):
        assert ask(toy, f"{shared}", [*range(shared), 77, 77]) in (shared // 8 * 8, shared // 4 * 4)


def test_chunks_end_where_states_are_kept(engine):
    toy = engine(limits={"max_batched_tokens": 100})
    add(toy, "a", range(50), max_tokens=1)
    ends = []
    while toy.scheduler.has_work:
        batch = toy.scheduler.schedule()
        ends += [row.start + row.count for row in batch.rows]
        toy.scheduler.commit(batch, toy.compute(batch))
    assert ends == [48, 50]


def test_a_finer_unit_is_cut_to_as_well(engine):
    toy = engine(limits={"max_batched_tokens": 100}, units=(16, 4))
    ask(toy, "a", range(63))
    assert toy.scheduler.cache.states.inventory().checkpoints == 2  # at 48 and 60


def test_units_must_fit_the_blocks():
    with pytest.raises(ValueError, match="multiples of 4"):
        HybridCache(PrefixCache(4, 4), StateCheckpoints(1), units=(6,))
    with pytest.raises(ValueError, match="multiples of 4"):
        HybridCache(PrefixCache(4, 4), StateCheckpoints(1), interval=6)


def test_without_a_state_slot_a_request_waits(engine):
    toy = engine(slots=2)
    for name in "abc":
        add(toy, name, [ord(name)] * 9, max_tokens=3)
    toy.step()
    assert names(toy.scheduler.running) == ["a", "b"]
    assert sorted(names(toy.drain())) == ["a", "b", "c"]
    assert toy.scheduler.cache.states.inventory().live == 0


def test_checkpoints_give_way_to_requests(engine):
    toy = engine(slots=4, limits={"max_batched_tokens": 64})
    for name in "abcdef":
        ask(toy, name, [ord(name)] * 9)
    for name in "ghij":
        add(toy, name, [ord(name)] * 9, max_tokens=2)
    toy.step()
    assert len(toy.scheduler.running) == 4
    assert toy.scheduler.cache.states.inventory() == StateInventory(4, 0, 0)
    toy.drain()


def test_a_failed_step_starts_again_from_what_is_cached(engine):
    toy = engine()
    sequence = add(toy, "a", range(40), max_tokens=6)
    for _ in range(4):
        toy.step()
    assert sequence.output_tokens == 1
    batch = toy.scheduler.schedule()
    toy.compute(batch)
    toy.scheduler.cache.states.lost(sequence)
    toy.scheduler.discard(batch)
    toy.scheduler.check_invariants()
    assert names(toy.scheduler.waiting) == ["a"] and not toy.scheduler.running
    toy.drain()
    assert sequence.output_ids == expected_output(list(range(40)), 6)
    assert toy.computed_positions < 40 + 1 + 40 + 6  # it did not start from nothing


def test_nothing_is_kept_that_the_runner_did_not_report(engine):
    toy = engine()
    cache = toy.scheduler.cache
    add(toy, "a", range(20), max_tokens=8)
    while toy.scheduler.has_work:
        batch = toy.scheduler.schedule()
        cache.states.take_orders()
        toy.scheduler.commit(batch, [1] * sum(row.samples for row in batch.rows))
    assert cache.states.inventory().checkpoints == 0 and cache.states.counters.not_exact > 0
    assert len(cache.match(Sequence("b", range(20), 1))) == 0


def test_reset_forgets_states_too(engine):
    toy = engine()
    ask(toy, "a", range(20))
    add(toy, "b", range(100, 140), max_tokens=4)
    toy.step()
    assert toy.scheduler.reset_cache() is False
    assert toy.scheduler.reset_cache(preempt_running=True) is True
    assert toy.scheduler.cache.states.inventory().checkpoints == 0
    toy.drain()
    assert ask(toy, "a again", range(20)) == 0


def test_salts_have_their_own_states(engine):
    toy = engine()
    for turn, cached in ((0, 0), (1, 16)):
        for salt in ("x", "y", None):
            sequence = add(toy, f"{turn} {salt}", range(20), max_tokens=2, salt=salt)
            toy.drain()
            assert sequence.cached_tokens == cached
            assert sequence.output_ids == expected_output(list(range(20)), 2, salt=salt)


def test_sixteen_identical_prompts_compute_their_prefix_once(engine):
    toy = engine(slots=40, limits={"max_running": 16, "max_batched_tokens": 64})
    for number in range(16):
        add(toy, f"{number}", range(20), max_tokens=1)
    toy.drain()
    assert toy.computed_positions == 20 + 15 * 4


@pytest.mark.parametrize("seed", range(4))
def test_random_traffic_gives_the_tokens_of_a_fresh_engine_and_hits(engine, seed):
    rng = random.Random(seed)
    toy = engine(
        tokens=128, slots=rng.choice([5, 12]), interval=rng.choice([None, 16]), limits={"max_chunk_tokens": 7}
    )
    requests = []
    for number in range(150):
        stem = [rng.randrange(2)] * rng.choice([0, 8, 17, 32])
        prompt = [*stem, *[rng.randrange(3) for _ in range(rng.randrange(1, 20))]]
        requests.append((add(toy, f"{number}", prompt, rng.randrange(1, 9)), prompt))
        if rng.random() < 0.1:
            toy.scheduler.abort(f"{rng.randrange(number + 1)}")
        for _ in range(rng.randrange(5)):
            if toy.scheduler.has_work:
                toy.step()
    toy.drain()
    for sequence, prompt in requests:
        assert sequence.output_ids == expected_output(prompt, sequence.max_tokens)[: sequence.output_tokens]
    assert sum(sequence.cached_tokens for sequence, _ in requests) > 100
    cache = toy.scheduler.cache
    assert cache.free_blocks == cache.blocks and cache.states.inventory().live == 0
