"""Invariants a, b, f, g and h of the research notes, on random traffic through both kinds of cache.

c, d, e and i are in test_radix_tree, j (both caches hit alike) in test_radix_cache.
"""

import random

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.kv_cache.prefix_cache import PrefixCache
from tests.replica.cache_steps import compute, hit, request, run, start
from tests.replica.caches import CACHES, PAGE

TOKENS = 96


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def traffic(cache, seed, rounds=150):
    """After each step of random arrivals, chunks, outputs and ends: who holds what."""
    chance = random.Random(seed)
    running = []
    for number in range(rounds):
        while running and (len(running) > 3 or chance.random() < 0.4):
            cache.release(running.pop(chance.randrange(len(running))))
            yield running
        tokens = [*range(chance.randrange(20)), *[chance.randrange(3) for _ in range(chance.randrange(1, 9))]]
        sequence = request(f"{number}", tokens, salt=chance.choice([None, "x"]))
        if not cache.adopt(sequence, cache.match(sequence)):
            continue
        running.append(sequence)
        middle = max(sequence.computed_tokens, chance.randrange(len(tokens)))
        compute(cache, sequence, middle)
        yield running
        compute(cache, sequence)
        sequence.token_ids.append(7)
        sequence.output_tokens += 1
        cache.extend(sequence)
        yield running


def parts(cache):
    """Blocks by what they are: neither cached nor held, cached only, cached and held; numbers."""
    if isinstance(cache, PrefixCache):
        held = [block for block in cache.pool.blocks if block.references]
        idle = [block for block in cache.pool.blocks if not block.references]
        cached = [block.number for block in held if block.key is not None]
        return (
            [block.number for block in idle if block.key is None],
            [block.number for block in idle if block.key is not None],
            cached,
        )
    evictable = [slot for node in cache.tree.walk() for slot in node.slots if node.pins == 0]
    pinned = [slot for node in cache.tree.walk() for slot in node.slots if node.pins]
    assert len(evictable) == cache.tree.evictable
    return list(cache._free), evictable, pinned


@pytest.mark.parametrize("seed", range(2))
def test_invariant_a_free_evictable_protected_and_private_make_the_pool(make, seed):
    cache = make(TOKENS)
    for running in traffic(cache, seed):
        free, evictable, protected = parts(cache)
        private = {number for one in running for number in one.block_table[one.published_blocks :]}
        assert len(free) + len(evictable) + len(protected) + len(private) == cache.blocks
        assert cache.free_blocks == len(free) + len(evictable)


@pytest.mark.parametrize("seed", range(2))
def test_invariant_b_every_block_is_in_one_place(make, seed):
    cache = make(TOKENS)
    for running in traffic(cache, seed):
        private = [number for one in running for number in one.block_table[one.published_blocks :]]
        owned = [*(number for part in parts(cache) for number in part), *private]
        assert sorted(owned) == list(range(cache.blocks))


@pytest.mark.parametrize("seed", range(2))
def test_invariant_f_events_rebuild_what_can_be_hit(make, seed):
    cache = make(TOKENS, record_events=True)
    known, prefixes = set(), {}
    removed = 0
    for step, running in enumerate(traffic(cache, seed)):
        for one in running:
            for at, name in enumerate(chain(one.token_ids, PAGE, root_hash(one.salt)), 1):
                prefixes[name] = (one.token_ids[: at * PAGE], one.salt)
        for event in cache.take_events():
            if isinstance(event, BlocksStored):
                assert not known & {*event.block_hashes}
                known |= {*event.block_hashes}
            else:
                assert isinstance(event, BlocksRemoved) and known >= {*event.block_hashes}
                known -= {*event.block_hashes}
                removed += len(event.block_hashes)
        assert known == set(cache.cached_hashes())
        if step % 30 == 0:
            assert known == {
                name
                for name, (tokens, salt) in prefixes.items()
                if hit(cache, tokens, salt=salt) == len(tokens)
            }
    assert removed > 20


@pytest.mark.parametrize("seed", range(2))
def test_invariant_g_a_hit_is_whole_blocks_and_leaves_a_token(make, seed):
    cache = make(TOKENS)
    longest = 0
    for running in traffic(cache, seed):
        for sequence in running:
            again = request("again", sequence.token_ids)
            found = len(cache.match(again)) * cache.block_size
            assert found <= len(again.token_ids) - 1
            assert start_of(cache, again) == found
            longest = max(longest, found)
    assert longest >= 16


def start_of(cache, sequence):
    """Tokens that are hit when it is adopted; released again."""
    if not cache.adopt(sequence, cache.match(sequence)):
        return len(cache.match(sequence)) * cache.block_size
    computed = sequence.computed_tokens
    assert computed % cache.block_size == 0
    cache.release(sequence)
    return computed


@pytest.mark.parametrize("seed", range(2))
def test_invariant_h_what_was_stored_is_found_unless_evicted(make, seed):
    chance = random.Random(seed)
    cache = make(4_000, record_events=True)
    texts = []
    for number in range(40):
        text = [*range(chance.randrange(30)), *[chance.randrange(3) for _ in range(chance.randrange(1, 30))]]
        run(cache, request(f"{number}", text))
        texts.append(text)
    assert not any(isinstance(event, BlocksRemoved) for event in cache.take_events())
    for text in texts:
        assert hit(cache, text) == len(text) // cache.block_size * cache.block_size
    big = request("big", [9] * 3_900)
    start(cache, big)
    assert sum(hit(cache, text) for text in texts) < sum(map(len, texts)), "evicted, and so not found"
    cache.check_invariants([big])
