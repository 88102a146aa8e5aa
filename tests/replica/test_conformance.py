"""Portable cases of vLLM and SGLang that no other file has, by the ids of docs/conformance.md."""

import asyncio
import random

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.engine_limits import TierLimits
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from replica.kv_cache.state_checkpoints import CopyState, StateCheckpoints
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
from replica.server.client_error import ClientError
from replica.server.fields import Fields
from replica.server.salt_rule import SaltRule
from replica.server.settings import completion_settings
from tests.replica.equality_fuzz import BLOCK, DEAR
from tests.replica.models import finish_all, greedy_request, make_engine, random_model, token_ids
from tests.replica.serving import post, replica
from tests.replica.toy_engine import ToyEngine

CACHES = {
    "blocks": lambda **options: PrefixCache(16, 4, **options),
    "radix": lambda **options: RadixCache(16, 4, **options),
}


def _run(cache, name, tokens, stops=(), **identity):
    """Adopt, compute up to each of ``stops`` and to the end, publish each time; the sequence, still held."""
    sequence = Sequence(name, tokens, max_tokens=4, **identity)
    assert cache.adopt(sequence, cache.match(sequence))
    for stop in (*stops, len(tokens)):
        sequence.computed_tokens = stop
        cache.publish(sequence)
    return sequence


def test_h7_the_salt_is_in_the_root_alone():
    """Later blocks take it from their parent: what follows the same parent is named alike."""
    salted, plain = (chain(range(12), 4, root_hash(salt, None)) for salt in ("salt", None))
    assert all(one != other for one, other in zip(salted, plain, strict=True))
    assert chain(range(4, 12), 4, salted[0]) == salted[1:]


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_m8_blocks_published_in_two_goes_are_those_published_in_one(make):
    twice, once = make(record_events=True), make(record_events=True)
    _run(twice, "a", range(14), stops=(8,))
    _run(once, "a", range(14))
    stored = [[one for event in cache.take_events() for one in event.block_hashes] for cache in (twice, once)]
    assert stored[0] == stored[1] and len(stored[0]) == 3
    probe = Sequence("b", range(14), max_tokens=1)
    assert len(twice.match(probe)) == len(once.match(probe)) == 3


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_h10_m16_events_name_adapter_and_salt_as_they_came(make):
    cache = make(record_events=True)
    _run(cache, "a", range(8), stops=(4,), salt="foo", adapter="bar")
    first, second = cache.take_events()
    assert isinstance(first, BlocksStored) and isinstance(second, BlocksStored)
    assert (first.adapter, first.salt, first.parent_hash) == ("bar", "foo", None)
    assert first.extra_keys == (("bar", "foo"),), "untagged, adapter first"
    assert second.extra_keys == (("bar",),), "as vLLM: the adapter with every block, the salt with the first"
    assert (second.adapter, second.salt, second.parent_hash) == ("bar", None, first.block_hashes[-1])


def test_h8_prompt_embeddings_are_refused():
    """They have no tokens to be told apart by, and this replica cannot compute them."""
    body = {"prompt": "x", "prompt_embeds": "AAAA"}
    with pytest.raises(ClientError, match="prompt_embeds is not supported; give the prompt as text"):
        completion_settings(Fields(body), frozenset(), 256, SaltRule())


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_m13_nothing_but_the_record_depends_on_what_is_recorded(make):
    """The same traffic with events and evictions recorded, and with neither: the same tables and hits."""
    options = {"record_events": True, "record_evictions": True}
    lives = []
    recording = make(**options)
    for cache in (recording, make()):
        chance, life, running = random.Random(13), [], []
        for number in range(80):
            while len(running) > 2:
                cache.release(running.pop(chance.randrange(3)))
            tokens = [*range(chance.randrange(12)), *[chance.randrange(3) for _ in range(5)]]
            sequence = Sequence(f"{number}", tokens, max_tokens=1)
            if cache.adopt(sequence, cache.match(sequence)):
                life.append((sequence.computed_tokens, list(sequence.block_table)))
                sequence.computed_tokens = len(tokens)
                cache.publish(sequence)
                running.append(sequence)
        lives.append((life, cache.counters))
        recorded = [cache.take_events(), cache.take_evictions()]
        assert all(recorded) if cache is recording else not any(recorded)
    assert lives[0] == lives[1] and len(lives[0][0]) == 80


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_m20_scratch_is_reused_before_any_tail_and_tails_stay_hittable(make):
    """vLLM frees what a window has left behind so; here an aborted prefill leaves both kinds."""
    cache = make()
    for name, first in (("a", 0), ("b", 100)):
        sequence = Sequence(name, range(first, first + 32), max_tokens=4)
        assert cache.adopt(sequence, cache.match(sequence))
        sequence.computed_tokens = 14  # three blocks published, five are scratch
        cache.publish(sequence)
        cache.release(sequence)
    scratch = Sequence("c", range(200, 240), max_tokens=4)  # 10 blocks, as many as are scratch
    assert cache.adopt(scratch, cache.match(scratch))
    for first in (0, 100):
        assert len(cache.match(Sequence("probe", range(first, first + 13), max_tokens=1))) == 3
    one_more = Sequence("d", [300], max_tokens=1)
    assert cache.adopt(one_more, cache.match(one_more))
    found = [
        len(cache.match(Sequence("probe", range(first, first + 13), max_tokens=1))) for first in (0, 100)
    ]
    assert found == [2, 3], "then the tail of what was free longest"
    cache.check_invariants([scratch, one_more])


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_m19_preempted_and_admitted_again_no_block_is_in_two_tables(make):
    toy = ToyEngine(
        Scheduler(make(), SchedulerLimits(max_running=4, max_batched_tokens=16, max_model_len=60))
    )
    for name in "abcd":
        toy.scheduler.add(Sequence(name, [*range(8), ord(name)], max_tokens=20))
    toy.drain()  # ToyEngine.check: a place that is written is in one table
    assert toy.scheduler.preemptions > 0 and toy.scheduler.cache.free_blocks == 16


def test_s2_who_waits_for_a_load_is_counted_once():
    cache = PrefixCache(16, 4)
    scheduler = Scheduler(cache, SchedulerLimits(max_running=4, max_batched_tokens=16, max_model_len=60))
    waiting = Sequence("a", range(30), max_tokens=1)
    load = scheduler.loads.begin(waiting, 24)
    assert scheduler.schedule().empty
    scheduler.loads.arrived(load, 24)
    scheduler.add(waiting)
    scheduler.loads.end(load)
    while scheduler.has_work:
        batch = scheduler.schedule()
        scheduler.commit(batch, {"a": 1} if batch.rows[0].samples else {})
    counters = scheduler.load()
    assert (counters.prefix_queried_tokens, counters.prefix_hit_tokens) == (30, 24)


def test_s4_who_does_not_read_the_cache_fetches_nothing_from_tiers():
    tiers = TierLimits(40 * BLOCK, prefill=DEAR)
    engine = make_engine(kv_blocks=7, max_model_len=112, tiers=tiers)
    prompts = [[(7 * at + 31 * number) % 256 for at in range(70)] for number in range(3)]
    for prompt in prompts:
        finish_all(engine, [greedy_request("a", prompt, 1)])
    for reads in (False, True):
        asked = Sequence("b", prompts[0], 1, reads_cache=reads)
        assert engine._tiers.fetch_for(asked) is reads
    engine.close()


def test_d1_blocks_of_who_leaves_during_a_step_are_nobodys_until_the_step_is_over():
    cache = PrefixCache(8, 4)
    scheduler = Scheduler(cache, SchedulerLimits(max_running=4, max_batched_tokens=32, max_model_len=60))
    scheduler.add(Sequence("a", range(20), max_tokens=4))
    batch = scheduler.schedule()
    written = {number for row in batch.rows for number in row.sequence.block_table}
    scheduler.abort("a")
    scheduler.add(Sequence("b", range(50, 70), max_tokens=4))
    with pytest.raises(RuntimeError, match="in flight"):
        scheduler.schedule()
    assert scheduler.commit(batch, {"a": 1}) == [] and not list(cache.cached_hashes())
    (row,) = scheduler.schedule().rows
    assert {*row.sequence.block_table} & written, "only now are they taken"


def _hybrid(slots=2, **options):
    states = StateCheckpoints(slots)
    return HybridCache(PrefixCache(16, 4, record_events=True, **options), states), states


def _prefill(cache, states, name, tokens):
    sequence = Sequence(name, tokens, max_tokens=4)
    assert cache.adopt(sequence, cache.match(sequence))
    cached = at = sequence.computed_tokens
    while at < len(tokens):
        stop = cache.chunk_stop(sequence, len(tokens))
        states.ran(sequence, at, stop)
        sequence.computed_tokens = at = stop
        cache.publish(sequence)
    cache.release(sequence)
    return cached


def test_mamba_a_state_that_went_leaves_kv_that_is_no_hit_and_no_event():
    """test_mamba_unittest: tombstones. The KV stays stored for those who listen, until its memory goes."""
    cache, states = _hybrid()
    assert _prefill(cache, states, "a", range(10)) == 0
    stored = [one for event in cache.take_events() for one in event.block_hashes]
    _prefill(cache, states, "b", range(100, 110))  # takes the one slot that is no live state
    told = cache.take_events()
    assert not any(isinstance(event, BlocksRemoved) for event in told)
    probe = Sequence("c", range(10), max_tokens=1)
    assert len(cache.match(probe)) == 0 and len(cache.kv.match(probe)) == 2
    _prefill(cache, states, "large", range(200, 264))
    gone = [
        one for event in cache.take_events() if isinstance(event, BlocksRemoved) for one in event.block_hashes
    ]
    assert set(stored) <= set(gone)
    cache.check_invariants([])


def test_mamba_a_hit_copies_the_state_and_makes_only_its_own_checkpoint_young():
    states = StateCheckpoints(3)
    states.begin("a", None)
    for position, name in ((4, b"four"), (8, b"eight")):
        states.ran("a", position - 4, position)
        assert states.publish("a", position, name)
    states.end("a")
    states.take_orders()
    slot = states.begin("b", b"eight")
    (copied,) = states.take_orders()
    assert isinstance(copied, CopyState) and copied.target == slot != copied.source
    states.begin("c", None)  # takes the oldest: the ancestor, not the one that was hit
    assert states.checkpoint_position(b"four") is None and states.checkpoint_position(b"eight") == 8


def test_y5_more_checkpoints_never_mean_fewer_hits():
    chance = random.Random(5)
    prompts = [[*range(chance.randrange(30)), *[chance.randrange(3) for _ in range(8)], 7] for _ in range(30)]
    found = {}
    for interval in (None, 8, 4):
        states = StateCheckpoints(600)
        cache = HybridCache(PrefixCache(600, 4), states, interval=interval)
        found[interval] = [_prefill(cache, states, f"{at}", prompt) for at, prompt in enumerate(prompts)]
    for fewer, more in ((None, 8), (8, 4)):
        assert all(one <= other for one, other in zip(found[fewer], found[more], strict=True))
    assert sum(found[None]) < sum(found[4])


def test_y6_a_chunk_ends_only_where_a_state_is_kept_or_the_prompt_ends():
    cache, states = _hybrid(slots=40)
    sequence = Sequence("a", range(30), max_tokens=4)
    assert cache.adopt(sequence, cache.match(sequence))
    at = 0
    while at < 30:
        stop = cache.chunk_stop(sequence, 30)
        states.ran(sequence, at, stop)
        sequence.computed_tokens = at = stop
        published = states.counters.published
        cache.publish(sequence)
        assert states.counters.published == published + (stop < 30)
    assert states.counters.published > 0 == states.counters.not_exact


@pytest.mark.parametrize("model", ["tiny", "tiny-hybrid"])
def test_prefix_cache_hit_matches_cold_cache_and_reaches_the_last_full_block(model):
    """vLLM's CPU tests of linear attention, which guard against passing without a hit."""
    engine = make_engine(random_model(model), batch_invariant=True)
    prompt = [(29 * at + at // 5) % 256 for at in range(100)]
    cold, warm = (finish_all(engine, [greedy_request(name, prompt, 10)])[name] for name in ("cold", "warm"))
    assert token_ids(cold) == token_ids(warm)
    assert (cold[-1].cached_tokens, warm[-1].cached_tokens) == (0, 96)
    chunked = make_engine(random_model(model), batch_invariant=True, max_chunk_tokens=13)
    assert token_ids(finish_all(chunked, [greedy_request("a", prompt, 10)])["a"]) == token_ids(cold)


def test_m1_cached_tokens_over_http_are_whole_blocks_short_of_the_last_token():
    async def run() -> None:
        async with replica() as running:
            for tokens, cached in ((37, 32), (48, 32), (49, 48)):
                body = {"model": "tiny", "prompt": [tokens + at for at in range(tokens)], "max_tokens": 1}
                for wanted in (0, cached):
                    _, answer = await post(running.url + "/v1/completions", body)
                    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == wanted

    asyncio.run(run())
