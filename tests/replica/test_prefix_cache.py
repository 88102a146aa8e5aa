"""The prefix cache: the M cases of the portable conformance list, verification, isolation, events.

Upstream keeps block 0 as a null block, so its cases speak of blocks 1 to 10; ours are 0 to 9.
"""

import doctest

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from replica.kv_cache import prefix_cache as module
from replica.kv_cache.prefix_cache import PrefixCache
from replica.sequence import Sequence
from tests.replica.cache_steps import compute, request

COMMON = list(range(48))


def start(cache, sequence):
    """Match, adopt and compute; the blocks that were hit, or None when it does not fit."""
    matched = cache.match(sequence)
    if not cache.adopt(sequence, matched):
        return None
    compute(cache, sequence)
    return matched


def generate(cache, sequence, tokens):
    """Append tokens and compute their KV; False when there is no room."""
    sequence.token_ids += tokens
    sequence.output_tokens += len(tokens)
    if not cache.extend(sequence):
        return False
    compute(cache, sequence)
    return True


def free(cache):
    return [block.number for block in cache.pool.free]


def references(cache, numbers):
    return {cache.pool.blocks[number].references for number in numbers}


def cached(cache, numbers):
    return [cache.pool.blocks[number].key is not None for number in numbers]


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_m1_prefill():
    cache = PrefixCache(10)
    a = request("a", [*COMMON, *[3] * 7])
    assert start(cache, a) == []
    assert a.block_table == [0, 1, 2, 3]
    assert cached(cache, a.block_table) == [True, True, True, False]
    assert references(cache, a.block_table) == {1}
    assert a.block_hashes == chain(a.token_ids, 16, root_hash())

    b = request("b", [*COMMON, *[4] * 5])
    assert start(cache, b) == [0, 1, 2]
    assert b.block_table == [0, 1, 2, 4]
    assert references(cache, [0, 1, 2]) == {2}
    assert cache.free_blocks == 5
    cache.check_invariants([a, b])

    cache.release(a)
    cache.release(b)
    assert free(cache) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]

    c = request("c", [*COMMON, *[5] * 6])
    assert start(cache, c) == [0, 1, 2]  # free, but not gone
    assert c.block_table == [0, 1, 2, 4]
    assert cache.free_blocks == 6
    cache.release(c)
    assert free(cache) == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]

    d = request("d", [99] * 160)
    assert start(cache, d) == []
    assert d.block_table == [4, 3, 5, 6, 7, 8, 9, 2, 1, 0]
    assert cache.free_blocks == 0
    cache.check_invariants([d])


def test_m2_prompt_log_probabilities_write_but_never_read():
    cache = PrefixCache(10)
    a = request("a", [*COMMON, *[3] * 7], reads_cache=False)
    start(cache, a)
    b = request("b", [*COMMON, 4])
    assert start(cache, b) == [0, 1, 2]
    c = request("c", [*COMMON, *[3] * 7], reads_cache=False)
    assert start(cache, c) == []
    assert not set(c.block_table) & {*a.block_table, *b.block_table}
    assert c.block_hashes == a.block_hashes
    assert references(cache, c.block_table) == {1}
    assert c.cached_tokens == 0
    assert cache.counters.queried_tokens == b.prompt_tokens  # only the one that looked
    cache.check_invariants([a, b, c])


def test_m3_decode():
    cache = PrefixCache(10)
    a = request("a", [*COMMON, *[3] * 7])
    start(cache, a)
    assert generate(cache, a, [8] * 4)
    assert len(a.block_table) == 4 and cached(cache, a.block_table[3:]) == [False]
    assert generate(cache, a, [8] * 19)
    assert len(a.block_table) == 5 and cached(cache, a.block_table[3:]) == [True, False]
    # A longer prompt that quotes the answer hits the generated block too.
    assert start(cache, request("b", [*a.token_ids[:64], 0])) == a.block_table[:4]


def test_m4_eviction_order():
    cache = PrefixCache(10)
    a = request("a", range(87))
    b = request("b", range(1000, 1048))
    start(cache, a)
    start(cache, b)
    assert (a.block_table, b.block_table) == ([0, 1, 2, 3, 4, 5], [6, 7, 8])
    cache.release(a)
    assert free(cache) == [5, 9, 4, 3, 2, 1, 0]
    cache.release(b)
    assert free(cache) == [5, 9, 4, 3, 2, 1, 0, 8, 7, 6]
    c = request("c", [*range(32), 7, 7, 7])
    assert start(cache, c) == [0, 1]
    assert c.block_table == [0, 1, 5]
    assert cache.free_blocks == 7
    cache.check_invariants([c])


def test_m6_matched_blocks_are_never_taken_for_the_same_sequence():
    cache = PrefixCache(2)
    a = request("a", COMMON[:32])
    start(cache, a)
    cache.release(a)
    assert free(cache) == [1, 0]
    b = request("b", [*COMMON[:16], 99])
    # Freed after, so that block 0 is the next to be reused: the matched one must be held first.
    cache.pool.free.remove(cache.pool.blocks[0])
    cache.pool.free.prepend([cache.pool.blocks[0]])
    assert start(cache, b) == [0]
    assert b.block_table == [0, 1]
    cache.check_invariants([b])


def test_m7_cache_switched_off():
    cache = PrefixCache(4, block_size=4, enabled=False)
    a = request("a", range(10))
    assert start(cache, a) == [] and len(a.block_table) == 3
    assert generate(cache, a, [1] * 6) and len(a.block_table) == 4
    assert not generate(cache, a, [1] * 4)
    cache.release(a)
    assert cache.match(request("b", range(10))) == []
    assert cache.counters.queried_tokens == 0
    cache.check_invariants([])


def test_m10_salt_and_adapter_separate():
    cache = PrefixCache(30)
    prompt = [*COMMON, 1]
    for name, options in enumerate(
        [{}, {"salt": "one"}, {"salt": "two"}, {"adapter": "one"}, {"salt": "one", "adapter": "one"}]
    ):
        assert start(cache, request(f"cold{name}", prompt, **options)) == []
        assert len(start(cache, request(f"warm{name}", prompt, **options))) == 3


def test_m11_too_few_free_blocks_counting_the_free_ones_that_were_hit():
    cache = PrefixCache(10)
    a = request("a", COMMON)  # 3 blocks, held
    start(cache, a)
    b = request("b", [*COMMON, *range(100, 148)])  # the same 3 and 3 of its own, then free
    start(cache, b)
    cache.release(b)
    c = request("c", range(200, 248))  # 3 blocks, held: 4 free, of which 3 hold b's tail
    start(cache, c)
    d = request("d", [*COMMON, *range(100, 148), *range(300, 332)])  # hits 6, needs 2 more: 3 + 2 > 4
    matched = cache.match(d)
    assert len(matched) == 6
    before = free(cache)
    assert not cache.fits(d, matched)
    assert not cache.adopt(d, matched)
    assert references(cache, matched[:3]) == {1} and references(cache, matched[3:]) == {0}
    assert free(cache) == before and d.block_table == [] and d.cached_tokens == 0
    assert cache.counters.queried_tokens == 48 + 96 + 48
    cache.release(c)
    assert cache.adopt(d, matched)
    assert d.cached_tokens == 96
    compute(cache, d)
    cache.check_invariants([a, d])


def test_m12_reset_only_while_nothing_is_held():
    cache = PrefixCache(10, record_events=True)
    a = request("a", [*COMMON, 1])
    start(cache, a)
    assert cache.reset() is False
    assert len(cache.match(request("b", [*COMMON, 2]))) == 3
    cache.release(a)
    cache.take_events()
    assert cache.reset() is True
    assert cache.take_events() == [CacheCleared()]
    assert cache.match(request("b", [*COMMON, 2])) == []
    assert not any(cached(cache, range(10)))
    cache.check_invariants([])


def test_m15_events():
    cache = PrefixCache(5, record_events=True)
    a = request("a", range(80), salt="s", adapter="lora")
    start(cache, a)
    hashes = chain(range(80), 16, root_hash("s", "lora"))
    assert cache.take_events() == [
        BlocksStored(
            tuple(hashes), None, tuple(range(80)), 16, "lora", extra_keys=(("lora", "s"), *[("lora",)] * 4)
        )
    ]
    assert cache.take_events() == []
    cache.release(a)
    b = request("b", range(500, 580))
    start(cache, b)
    new = chain(range(500, 580), 16, root_hash())
    assert cache.take_events() == [
        BlocksRemoved(tuple(reversed(hashes))),
        BlocksStored(tuple(new), None, tuple(range(500, 580)), 16),
    ]
    cache.release(b)
    c = request("c", [*range(500, 532), *[1] * 16, 2])
    start(cache, c)
    assert cache.take_events()[-1] == BlocksStored((c.block_hashes[2],), c.block_hashes[1], (1,) * 16, 16)


def test_m15_a_second_copy_is_not_announced_and_its_end_neither():
    cache = PrefixCache(6, block_size=4, record_events=True)
    a, b = request("a", range(8)), request("b", [*range(8), *range(50, 54)], reads_cache=False)
    start(cache, a)
    start(cache, b)
    first, second = cache.take_events()
    assert first.block_hashes == tuple(chain(range(8), 4, root_hash()))
    assert (second.parent_hash, second.token_ids) == (first.block_hashes[1], (50, 51, 52, 53))
    cache.release(a)
    c = request("c", [9] * 8)  # takes the free block and one of a's, of which b has a copy
    start(cache, c)
    assert [type(event) for event in cache.take_events()] == [BlocksStored]
    cache.check_invariants([b, c])


def test_no_events_unless_asked_for():
    cache = PrefixCache(2)
    start(cache, request("a", range(32)))
    assert cache.take_events() == []


def test_m18_what_fits_says_is_what_adopt_takes():
    cache = PrefixCache(10)
    a = request("a", [*COMMON, 1])
    start(cache, a)
    cache.release(a)
    b = request("b", [*COMMON, *range(300, 400)])
    matched = cache.match(b)
    before = cache.free_blocks
    assert cache.fits(b, matched) and not cache.fits(b, matched, spare_blocks=1)
    assert not cache.adopt(b, matched, spare_blocks=1) and cache.adopt(b, matched)
    assert before - cache.free_blocks == 10 and len(set(b.block_table)) == 10


@pytest.mark.parametrize(
    ("prompt_tokens", "hit_blocks"), [(1, 0), (16, 0), (17, 1), (37, 2), (48, 2), (49, 3)]
)
def test_last_token_rule(prompt_tokens, hit_blocks):
    cache = PrefixCache(10)
    start(cache, request("a", range(64)))
    b = request("b", range(prompt_tokens))
    assert len(cache.match(b)) == hit_blocks
    assert cache.adopt(b, cache.match(b))
    assert b.cached_tokens == b.computed_tokens == 16 * hit_blocks < prompt_tokens


def test_matching_changes_nothing():
    cache = PrefixCache(10, record_events=True)
    a = request("a", [*COMMON, 1])
    start(cache, a)
    cache.release(a)
    cache.take_events()
    before = free(cache)
    for _ in range(3):
        cache.match(request("b", [*COMMON, 2]))
    assert free(cache) == before and cache.take_events() == []
    assert cache.counters.queried_tokens == 49


def test_adoption_makes_the_whole_prefix_young_again():
    cache = PrefixCache(4, block_size=4)
    old, young = request("old", range(8)), request("young", range(50, 58))
    for sequence in (old, young):
        start(cache, sequence)
        cache.release(sequence)
    assert free(cache) == [1, 0, 3, 2]
    again = request("again", [*range(8), 9])
    assert cache.match(again) == [0, 1]
    start(cache, again)
    cache.release(again)
    assert free(cache)[-2:] == [1, 0]


def test_b015_nothing_is_hittable_before_it_is_computed():
    cache = PrefixCache(10)
    a = request("a", [*COMMON, 1])
    cache.adopt(a, cache.match(a))
    assert cache.match(request("b", [*COMMON, 1])) == []
    a.computed_tokens = 20  # a chunk: one block whole, the second begun
    cache.publish(a)
    assert cache.match(request("b", [*COMMON, 1])) == [0]
    cache.release(a)  # aborted
    assert cache.match(request("b", [*COMMON, 1])) == [0]
    assert cached(cache, range(10)) == [True] + [False] * 9
    cache.check_invariants([])


def one_bit(parent, raw):
    return bytes([(sum(parent) + sum(raw)) & 1])


def test_a_colliding_hash_hands_out_nothing_wrong():
    cache = PrefixCache(40, block_size=2, raw_hash=one_bit)
    held = []
    for first in range(4):
        for second in range(4):
            sequence = request(f"{first}{second}", [first, 0, second, 0, 9])
            matched = start(cache, sequence)
            # The first block is shared by those with the same first token, and only by them.
            assert len(matched) == (1 if second else 0)
            held.append(sequence)
    cache.check_invariants(held)
    for sequence in held:
        again = request("again", sequence.token_ids)
        assert [cache.pool.blocks[n].content for n in cache.match(again)] == sequence.block_contents[:2]


def test_a_colliding_hash_does_not_cross_tenants():
    cache = PrefixCache(10, block_size=2, raw_hash=lambda parent, raw: b"x")
    start(cache, request("a", [1, 2, 3], salt="one"))
    assert cache.match(request("b", [1, 2, 3], salt="two")) == []
    assert cache.match(request("b", [1, 2, 3])) == []
    assert cache.match(request("b", [1, 2, 3], salt="one")) == [0]


def test_B112_preempted_sequences_are_counted_apart():
    cache = PrefixCache(10)
    a = request("a", [*COMMON, 1])
    start(cache, a)
    generate(cache, a, [5] * 20)
    cache.release(a)
    a.preemptions = 1
    assert len(start(cache, a)) == 4  # its own output too
    assert a.cached_tokens == 0
    counters = cache.counters
    assert (counters.queried_tokens, counters.hit_tokens) == (49, 0)
    assert (counters.resumed_queried_tokens, counters.resumed_hit_tokens) == (69, 64)


def blocks(name, ids, prompt_tokens, **options):
    return Sequence.of_blocks(name, ids, prompt_tokens, 64, block_size=16, **options)


def test_opaque_ids_are_served_by_the_same_rules():
    cache = PrefixCache(20, record_events=True)
    a = blocks("a", [7, 8, 9], 40)  # the id of the partial block is ignored
    assert start(cache, a) == [] and cached(cache, a.block_table) == [True, True, False]
    assert cache.take_events() == [BlocksStored((7, 8), None, (), 16)]
    assert start(cache, blocks("b", [7, 8, 10], 48)) == [0, 1]
    assert start(cache, blocks("c", [7, 11], 33)) == [0]
    assert start(cache, blocks("d", [7, 8], 32)) == [0]  # last-token rule
    assert start(cache, blocks("e", [7, 8], 33, salt="s")) == []
    assert start(cache, blocks("f", [8], 17)) == []  # known, but under another parent


def test_ids_can_name_generated_blocks():
    cache = PrefixCache(20)
    a = blocks("a", [7], 20, output_block_ids=[100, 101])
    start(cache, a)
    a.output_tokens = 29
    cache.extend(a)
    compute(cache, a)
    assert cached(cache, a.block_table) == [True, True, True, False]
    assert start(cache, blocks("b", [7, 100, 101, 5], 64)) == a.block_table[:3]


def test_tokens_and_ids_never_meet():
    cache = PrefixCache(20)
    a = request("a", range(17))
    start(cache, a)
    assert cache.match(blocks("b", [0, 1], 32)) == []


def test_too_few_ids_are_refused():
    with pytest.raises(ValueError, match="1 block ids for 2 full blocks"):
        blocks("a", [7], 32)


def test_check_invariants_finds_damage():
    def damaged(damage):
        cache = PrefixCache(10)
        a, b = request("a", [*COMMON, 1]), request("b", [*COMMON, 2])
        start(cache, a)
        start(cache, b)
        cache.check_invariants([a, b])
        damage(cache, a)
        with pytest.raises(AssertionError):
            cache.check_invariants([a, b])

    damaged(lambda cache, a: a.block_table.append(9))
    damaged(lambda cache, a: a.block_table.pop())
    damaged(lambda cache, a: a.block_table.__setitem__(3, a.block_table[0]))
    damaged(lambda cache, a: a.token_ids.__setitem__(0, 5))
    damaged(lambda cache, a: setattr(a, "root", b"another"))
    damaged(lambda cache, a: setattr(a, "published_blocks", 2))
