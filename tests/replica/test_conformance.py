"""Portable cases of vLLM and SGLang that no other file has, by the ids of the research notes.

Q1 to Q8 are in test_free_queue, H3 to H5 and H9 in test_block_hash, M1 to M7 and M10 to M18 in
test_block_pool and test_prefix_cache, the radix list (r) and invariants a to j in test_radix_tree and
test_radix_cache. Without a counterpart here: H1 and H2 (vLLM's seeds of the root), H6, H8 and M9 (images and
embeddings in prompts), M13 (statistics that can be off), M17 (draft models), M20 (windows that free blocks).
"""

import asyncio

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.kv_cache.hybrid_cache import HybridCache
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from replica.kv_cache.state_checkpoints import CopyState, StateCheckpoints
from replica.scheduler import Scheduler, SchedulerLimits
from replica.sequence import Sequence
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


@pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)
def test_m19_preempted_and_admitted_again_no_block_is_in_two_tables(make):
    toy = ToyEngine(
        Scheduler(make(), SchedulerLimits(max_running=4, max_batched_tokens=16, max_model_len=60))
    )
    for name in "abcd":
        toy.scheduler.add(Sequence(name, [*range(8), ord(name)], max_tokens=20))
    toy.drain()  # ToyEngine.check: a place that is written is in one table
    assert toy.scheduler.preemptions > 0 and toy.scheduler.cache.free_blocks == 16


def _hybrid(**options):
    states = StateCheckpoints(2)
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
