"""All caches: what parts two prompts (tokens, salt, adapter, ids); hashes that collide do not matter."""

import pytest

from replica.contract.block_hash import raw_block_hash
from replica.contract.kv_events import BlocksStored
from replica.sequence import Sequence
from tests.replica.cache_steps import PREFIX, compute, request, run, start, whole
from tests.replica.caches import CACHES, PAGE


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def test_salt_and_adapter_separate(make):
    cache = make(200)
    kinds = [
        {},
        {"salt": ""},
        {"salt": "one"},
        {"salt": "two"},
        {"adapter": "one"},
        {"salt": "one", "adapter": "one"},
    ]
    for options in kinds:
        assert run(cache, request("cold", [*PREFIX, 1], **options)) == 0
    for options in kinds:
        assert run(cache, request("warm", [*PREFIX, 2], **options)) == 20
    assert whole(cache)


def blocks(name, ids, prompt_tokens, **options):
    return Sequence.of_blocks(name, ids, prompt_tokens, 64, block_size=PAGE, **options)


@pytest.mark.parametrize("kind", ["blocks", "radix"])
def test_opaque_ids_follow_the_same_rules(kind):
    cache = CACHES[kind](80, record_events=True)
    a = blocks("a", [7, 8, 9], 10)  # the id of the partial block is ignored
    assert start(cache, a) == 0
    assert cache.take_events() == [BlocksStored((7, 8), None, (), PAGE)]
    for ids, tokens, found, options in (
        ([7, 8, 10], 12, 8, {}),
        ([7, 11], 9, 4, {}),
        ([7, 8], 8, 4, {}),  # last-token rule
        ([7, 8], 9, 0, {"salt": "s"}),
        ([8], 5, 0, {}),  # known, but under another parent
    ):
        b = blocks("b", ids, tokens, **options)
        assert len(cache.match(b)) * PAGE == found and run(cache, b) == found
        cache.check_invariants([a])
    cache.release(a)
    assert whole(cache)


@pytest.mark.parametrize("kind", ["blocks", "radix"])
def test_ids_can_name_generated_blocks(kind):
    cache = CACHES[kind](80)
    a, c = blocks("a", [7], 5, output_block_ids=[100, 101]), blocks("c", [50], 5)
    for sequence in (a, c):
        start(cache, sequence)
        sequence.output_tokens = 9  # 14 tokens: three blocks and two tokens
        assert cache.extend(sequence)
        compute(cache, sequence)
        cache.check_invariants([a, c][: 1 + (sequence is c)])
    assert run(cache, blocks("b", [7, 100, 101, 5], 16)) == 12
    assert c.published_blocks == 1  # a generated block without a name is never published


def test_tokens_and_ids_never_meet(make):
    cache = make(80)
    run(cache, request("a", [0, 1, 2, 3, 4]))
    probe = Sequence.of_blocks("b", [0, 1], 2 * cache.block_size, 1, block_size=cache.block_size)
    assert len(cache.match(probe)) == 0


def one_bit(parent, raw):
    return bytes([raw_block_hash(parent, raw)[0] & 1])


def test_a_colliding_hash_hands_out_nothing_wrong(make):
    cache = make(400, raw_hash=one_bit, record_events=True)
    held = []
    for first in range(4):
        for second in range(4):
            sequence = request(f"{first}{second}", [first] * 4 + [second] * 4 + [9])
            found = start(cache, sequence)
            assert found == (4 if second else 0), (
                "shared by those with the same first block, and only by them"
            )
            held.append(sequence)
    cache.check_invariants(held)
    for sequence in held:
        again = request("again", [*sequence.token_ids])
        assert start(cache, again) == 8
        assert again.block_table[: 8 // cache.block_size] == sequence.block_table[: 8 // cache.block_size]
        cache.release(again)
    told = {}
    for event in cache.take_events():
        for block_hash in event.block_hashes:
            told[block_hash] = told.get(block_hash, 0) + 1
    assert told == dict.fromkeys(cache.cached_hashes(), 1)
