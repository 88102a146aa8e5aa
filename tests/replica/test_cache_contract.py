"""One contract for all caches: what the scheduler may rely on, whichever it was given."""

import doctest
import random

import pytest

from replica.contract.block_hash import chain, raw_block_hash, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from replica.kv_cache import cache as module
from replica.sequence import Sequence
from tests.replica.caches import CACHES, PAGE, snapshot

PREFIX = list(range(100, 120))
"""20 tokens: 5 blocks."""


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


def request(name, tokens, **options):
    return Sequence(name, tokens, 8, **options)


def start(cache, sequence):
    """Match, adopt and compute; tokens that were hit, or None when it does not fit."""
    matched = cache.match(sequence)
    if not cache.adopt(sequence, matched):
        return None
    compute(cache, sequence)
    return len(matched) * cache.block_size


def compute(cache, sequence, tokens=None):
    sequence.computed_tokens = sequence.total_tokens if tokens is None else tokens
    cache.publish(sequence)


def run(cache, sequence):
    """Start to end; tokens that were hit."""
    found = start(cache, sequence)
    cache.release(sequence)
    return found


def hit(cache, tokens, **options):
    """Tokens a request that goes on after ``tokens`` would hit."""
    return len(cache.match(request("probe", [*tokens, 1 << 30], **options))) * cache.block_size


def whole(cache):
    cache.check_invariants([])
    return cache.free_blocks == cache.blocks and cache.stranded_tokens() == 0


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_what_was_computed_is_hit(make):
    cache = make(64)
    a = request("a", [*PREFIX, 1])
    assert start(cache, a) == 0
    b = request("b", [*PREFIX, 2, 3])
    assert start(cache, b) == 20 and b.cached_tokens == 20 and b.computed_tokens == 22
    assert b.block_table[: 20 // cache.block_size] == a.block_table[: 20 // cache.block_size]
    cache.check_invariants([a, b])
    for sequence in (a, b):
        cache.release(sequence)
        assert sequence.block_table == [] and sequence.computed_tokens == 0
    assert whole(cache) and hit(cache, PREFIX) == 20


def test_tables_hold_every_known_token_and_share_only_the_prefix(make):
    cache = make(64)
    a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2, 3])
    start(cache, a), start(cache, b)
    shared = 20 // cache.block_size
    for sequence in (a, b):
        assert len(sequence.block_table) == cache.blocks_for(sequence.total_tokens)
        assert len(set(sequence.block_table)) == len(sequence.block_table)
    assert not set(a.block_table[shared:]) & set(b.block_table[shared:])


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 8, 9, 19, 20])
def test_last_token_rule(make, tokens):
    """A hit never covers the last token, whose logits are wanted; whole blocks only."""
    cache = make(64)
    run(cache, request("a", [*PREFIX, 1]))
    b = request("b", PREFIX[:tokens])
    found = start(cache, b)
    assert found == (tokens - 1) // cache.block_size * cache.block_size < tokens


def test_looking_changes_nothing(make):
    cache = make(64, record_events=True)
    run(cache, request("a", [*PREFIX, 1]))
    cache.take_events()
    before = snapshot(cache)
    for tokens in (PREFIX, PREFIX[:7], [9, 9], [*PREFIX[:6], 5, 5, 5, 5]):
        for options in ({}, {"salt": "s"}):
            matched = cache.match(request("b", tokens, **options))
            cache.fits(request("b", tokens, **options), matched)
    assert snapshot(cache) == before and cache.take_events() == []


def test_adoption_is_all_or_nothing(make):
    cache = make(48)
    held = request("held", range(16))
    start(cache, held)
    run(cache, request("a", [*PREFIX, 1]))
    big = request("big", [*PREFIX, *range(500, 516)])  # 20 hit and free, 16 new: 36 of the 32 that are free
    matched = cache.match(big)
    assert len(matched) * cache.block_size == 20
    before = snapshot(cache)
    assert not cache.fits(big, matched) and not cache.adopt(big, matched)
    assert big.block_table == [] and big.cached_tokens == 0
    assert snapshot(cache) == before
    cache.release(held)
    assert cache.fits(big, matched) and cache.adopt(big, matched) and big.cached_tokens == 20
    cache.check_invariants([big])


def test_spare_blocks_stay_free(make):
    cache = make(48)
    a = request("a", PREFIX)
    blocks = cache.blocks_for(20)
    for spare in (cache.blocks - blocks + 1, cache.blocks - blocks):
        fits = spare == cache.blocks - blocks
        assert cache.fits(a, cache.match(a), spare) is fits
        assert cache.adopt(a, cache.match(a), spare) is fits
    assert cache.free_blocks == spare


def test_what_matched_is_not_evicted_for_the_same_sequence(make):
    cache = make(24)
    run(cache, request("a", PREFIX))  # 20 cached, 4 never used
    b = request("b", [*PREFIX[:8], *range(500, 516)])  # hits 8, needs 16: all that is left
    assert start(cache, b) == 8 and cache.free_blocks == 0
    cache.check_invariants([b])


def test_nothing_is_hittable_before_it_is_computed(make):
    cache = make(64)
    a = request("a", [*PREFIX, 1])
    cache.adopt(a, cache.match(a))
    cache.publish(a)
    assert hit(cache, PREFIX) == 0
    compute(cache, a, 10)  # a chunk; the third block is half done
    assert hit(cache, PREFIX) == 10 // cache.block_size * cache.block_size
    cache.check_invariants([a])
    cache.release(a)  # aborted
    assert hit(cache, PREFIX) == 10 // cache.block_size * cache.block_size
    assert whole(cache)


def test_publish_has_nothing_to_do_before_publish_at(make):
    cache = make(64)
    a = request("a", PREFIX)
    cache.adopt(a, cache.match(a))
    for tokens in range(1, 21):
        before, due = hit(cache, PREFIX), a.publish_at
        compute(cache, a, tokens)
        assert (hit(cache, PREFIX) > before) is (tokens >= due)


def test_generated_tokens_are_hit_too(make):
    cache = make(64)
    a = request("a", PREFIX)
    start(cache, a)
    for token in range(8):
        a.token_ids.append(token)
        a.output_tokens += 1
        assert cache.extend(a)
        compute(cache, a)
        cache.check_invariants([a])
    assert hit(cache, [*PREFIX, *range(8)]) == 28
    cache.release(a)
    assert hit(cache, [*PREFIX, *range(8)]) == 28 and whole(cache)


def test_extend_changes_nothing_when_blocks_are_missing(make):
    cache = make(24)
    a = request("a", PREFIX)
    start(cache, a)
    a.token_ids += range(5)
    a.output_tokens = 5
    before, table = snapshot(cache), list(a.block_table)
    assert not cache.extend(a) and a.block_table == table and snapshot(cache) == before
    a.token_ids.pop()
    a.output_tokens = 4
    assert cache.extend(a) and cache.extend(a) and len(a.block_table) == cache.blocks_for(24)
    with pytest.raises(IndexError):
        cache.take_block(a)


def test_two_who_compute_the_same_leave_one_prefix_to_hit(make):
    cache = make(64)
    a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
    for sequence in (a, b):
        assert cache.adopt(sequence, cache.match(sequence))
    for tokens in (6, 15, 21):
        for sequence in (a, b):
            compute(cache, sequence, tokens)
            cache.check_invariants([a, b])
    cache.release(a)
    cache.check_invariants([b])
    assert hit(cache, PREFIX) == 20
    cache.release(b)
    assert whole(cache)


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


def test_prompt_log_probabilities_write_but_never_read(make):
    cache = make(64)
    assert run(cache, request("a", [*PREFIX, 1], reads_cache=False)) == 0
    assert run(cache, request("b", [*PREFIX, 1], reads_cache=False)) == 0
    assert cache.counters.queried_tokens == 0
    assert run(cache, request("c", [*PREFIX, 1])) == 20
    assert (cache.counters.queried_tokens, cache.counters.hit_tokens) == (21, 20)
    assert whole(cache)


def test_switched_off(make):
    cache = make(32, enabled=False)
    a = request("a", [*PREFIX, 1])
    assert start(cache, a) == 0 and hit(cache, PREFIX) == 0
    cache.check_invariants([a])
    cache.release(a)
    assert run(cache, request("b", [*PREFIX, 1])) == 0
    assert cache.counters.queried_tokens == 0 and whole(cache)


def test_B112_preempted_sequences_are_counted_apart(make):
    cache = make(64)
    a = request("a", [*PREFIX, 1])
    start(cache, a)
    cache.release(a)
    a.preemptions = 1
    assert start(cache, a) == 20 and a.cached_tokens == 0
    counters = cache.counters
    assert (counters.queried_tokens, counters.hit_tokens) == (21, 0)
    assert (counters.resumed_queried_tokens, counters.resumed_hit_tokens) == (21, 20)


def test_what_somebody_holds_is_never_evicted(make):
    cache = make(64)
    a = request("a", [*PREFIX, 1])
    start(cache, a)
    for number in range(20):
        assert run(cache, request(f"{number}", [number] * 40)) == 0
        cache.check_invariants([a])
    assert hit(cache, PREFIX) == 20
    # 64 in all, a holds 21: 43 tokens (40 in blocks of four) and not one more.
    most = cache.free_blocks * cache.block_size
    b = request("b", [7] * (most + 1))
    assert not cache.adopt(b, cache.match(b))
    b = request("b", [8] * most)
    assert cache.adopt(b, cache.match(b)) and cache.free_blocks == 0


def test_hold_keeps_a_prefix_without_running_and_uncounted(make):
    cache = make(64)
    run(cache, request("a", [*PREFIX, 1]))
    before = (cache.counters.queried_tokens, cache.counters.hit_tokens)
    pin = request("pin", [*PREFIX[:12], 0])
    cache.hold(pin, cache.match(pin))
    assert len(pin.block_table) * cache.block_size == 12 == pin.computed_tokens
    assert (cache.counters.queried_tokens, cache.counters.hit_tokens) == before
    assert not cache.reset()
    for number in range(6):
        run(cache, request(f"{number}", [number] * 50))
        cache.check_invariants([pin])
    assert hit(cache, PREFIX) == 12
    cache.release(pin)
    assert whole(cache) and hit(cache, PREFIX) == 12
    run(cache, request("all", [9] * 64))
    assert hit(cache, PREFIX) == 0


def test_a_tail_goes_before_its_head_and_the_least_recent_first(make):
    cache = make(44)
    run(cache, request("old", PREFIX))
    run(cache, request("young", range(500, 520)))
    lost = []
    for number in range(1, 6):  # the first finds 4 tokens never used, the others evict all they need
        run(cache, request("new", [number] * (4 * number), salt=f"{number}"))
        lost.append((20 - hit(cache, PREFIX), 20 - hit(cache, range(500, 520))))
    assert lost == [(0, 0), (8, 0), (20, 0), (20, 16), (20, 20)]


def test_a_hit_makes_the_whole_prefix_young_again(make):
    cache = make(40)
    run(cache, request("first", PREFIX))
    run(cache, request("second", range(500, 520)))
    run(cache, request("first again", [*PREFIX[:16], 3]))
    run(cache, request("new", [9] * 16))
    assert hit(cache, PREFIX[:16]) == 16 and hit(cache, range(500, 520)) < 20


def test_reset_only_while_nobody_holds_anything(make):
    cache = make(64, record_events=True)
    a = request("a", [*PREFIX, 1])
    start(cache, a)
    before = snapshot(cache)
    assert cache.reset() is False and snapshot(cache) == before
    cache.release(a)
    cache.take_events()
    assert cache.reset() is True and cache.take_events() == [CacheCleared()]
    assert hit(cache, PREFIX) == 0 and whole(cache) and not list(cache.cached_hashes())
    assert run(cache, request("b", [*PREFIX, 1])) == 0


def test_events_name_blocks_by_their_chain(make):
    cache = make(64, record_events=True)
    run(cache, request("a", [*PREFIX, 1], salt="s", adapter="lora"))
    hashes = chain(PREFIX, PAGE, root_hash("s", "lora"))
    assert cache.take_events() == [
        BlocksStored(
            tuple(hashes), None, tuple(PREFIX), PAGE, "lora", extra_keys=(("lora", "s"), *[("lora",)] * 4)
        )
    ]
    assert cache.take_events() == [] and set(cache.cached_hashes()) == set(hashes)
    b = request("b", [*PREFIX, *range(8), 1], salt="s", adapter="lora")
    run(cache, b)
    (event,) = cache.take_events()
    assert event.block_hashes == tuple(chain([*PREFIX, *range(8)], PAGE, root_hash("s", "lora"))[5:])
    assert (event.parent_hash, event.token_ids) == (hashes[-1], tuple(range(8)))
    run(cache, request("all", [9] * 64))
    removed, stored = cache.take_events()
    assert isinstance(removed, BlocksRemoved) and isinstance(stored, BlocksStored)
    assert set(removed.block_hashes) == {*hashes, *event.block_hashes}
    assert len(removed.block_hashes) == 7  # each once
    # No block went before one that continues it.
    assert list(removed.block_hashes) == [*event.block_hashes[::-1], *hashes[::-1]]


def test_chunks_are_told_as_they_are_computed(make):
    cache = make(64, record_events=True)
    a = request("a", PREFIX)
    cache.adopt(a, cache.match(a))
    told = []
    for tokens in (3, 6, 15, 20):
        compute(cache, a, tokens)
        told.append([len(event.block_hashes) for event in cache.take_events()])
    assert told == [[], [1], [2], [2]]


def test_two_texts_that_part_inside_a_block(make):
    cache = make(64, record_events=True)
    run(cache, request("a", [1, 2, 3, 4, 5, 6, 7, 8, 0]))
    run(cache, request("b", [1, 2, 3, 4, 5, 6, 9, 9, 0]))
    first, second = cache.take_events()
    root = root_hash()
    assert first.block_hashes == tuple(chain([1, 2, 3, 4, 5, 6, 7, 8], PAGE, root))
    assert second.block_hashes == tuple(chain([1, 2, 3, 4, 5, 6, 9, 9], PAGE, root)[1:])
    assert (second.parent_hash, second.token_ids) == (first.block_hashes[0], (5, 6, 9, 9))
    # The finer page shares the two tokens of a block that belong to both.
    found = len(cache.match(request("c", [1, 2, 3, 4, 5, 6, 0]))) * cache.block_size
    assert found == (6 if cache.block_size == 1 else 4)
    assert whole(cache)


def test_evictions_name_memory_that_still_holds_the_block(make):
    cache = make(64, record_evictions=True)
    memory: dict[tuple[int, int], int] = {}

    def write(sequence, first):
        for position in range(first, sequence.total_tokens):
            block = sequence.block_table[position // cache.block_size]
            memory[block, position % cache.block_size] = sequence.token_ids[position]

    texts = {}
    for name, tokens in (("a", [*PREFIX, 1]), ("b", [*PREFIX[:10], *range(300, 312)]), ("c", range(60))):
        sequence = request(name, tokens)
        assert cache.adopt(sequence, cache.match(sequence))
        for evicted in cache.take_evictions():  # before anything is written
            there = [memory[block, i] for block in evicted.blocks for i in range(cache.block_size)]
            assert there == texts.pop(evicted.block_hash)
        write(sequence, sequence.computed_tokens)
        compute(cache, sequence)
        cache.release(sequence)
        for at, block_hash in enumerate(chain(tokens, PAGE, root_hash())):
            texts[block_hash] = list(tokens[at * PAGE : (at + 1) * PAGE])
    assert set(texts) == set(cache.cached_hashes())


def test_block_hashes_are_the_contract_s_chain(make):
    cache = make(64, record_events=True)
    a = request("a", PREFIX[:10], salt="s")
    assert list(cache.block_hashes(a)) == chain(PREFIX[:10], PAGE, root_hash("s"))[: 10 // cache.hash_tokens]
    assert cache.hash_tokens == PAGE
    start(cache, a)
    a.token_ids += PREFIX[10:]
    a.output_tokens = 10
    assert list(cache.block_hashes(a)) == chain(PREFIX, PAGE, root_hash("s"))
    cache.extend(a)
    compute(cache, a)
    told = [block_hash for event in cache.take_events() for block_hash in event.block_hashes]
    assert told == list(cache.block_hashes(a))
    size = cache.block_size
    ids = Sequence.of_blocks("b", range(1, 9), 8 * size, 1, block_size=size)
    assert list(cache.block_hashes(ids)) == list(range(1, 9))[PAGE // size - 1 :: PAGE // size]


def test_nothing_is_recorded_unless_asked_for(make):
    cache = make(16)
    for number in range(5):
        run(cache, request(f"{number}", [number] * 16))
    assert cache.take_events() == [] and cache.take_evictions() == []


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


@pytest.mark.parametrize(
    ("owner", "waits", "options", "worth"),
    [
        (PREFIX, [*PREFIX, 1], {}, True),
        (PREFIX, PREFIX[:17], {}, True),  # four blocks, and the last token's is its own
        (PREFIX, PREFIX[:4], {}, False),  # nothing but the block of its last token
        ([*PREFIX[:3], 9, *PREFIX[4:]], PREFIX, {}, False),
        (PREFIX, PREFIX, {"salt": "s"}, False),
    ],
)
def test_who_will_publish_what_is_missing(make, owner, waits, options, worth):
    cache = make(80)
    a, b = request("a", owner), request("b", waits, **options)
    cache.adopt(a, cache.match(a))
    assert cache.will_publish(a, b, len(cache.match(b))) is worth
    compute(cache, a)
    assert not cache.will_publish(a, b, len(cache.match(b)))


def test_senseless_sizes_are_refused(make):
    with pytest.raises(ValueError, match="at least 1"):
        make(0)


def test_check_invariants_finds_damage(make):
    def damaged(damage):
        cache = make(80)
        a, b = request("a", [*PREFIX, 1]), request("b", [*PREFIX, 2])
        start(cache, a), start(cache, b)
        cache.check_invariants([a, b])
        damage(cache, a, b)
        with pytest.raises((AssertionError, KeyError)):
            cache.check_invariants([a, b])

    damaged(lambda cache, a, b: a.block_table.append(cache.blocks - 1))
    damaged(lambda cache, a, b: a.block_table.pop())
    damaged(lambda cache, a, b: a.block_table.__setitem__(0, a.block_table[1]))
    damaged(lambda cache, a, b: a.block_table.__setitem__(-1, b.block_table[-1]))
    damaged(
        lambda cache, a, b: a.token_ids.__setitem__(0, 5) if cache.block_size == 1 else a.block_table.pop()
    )
    damaged(lambda cache, a, b: setattr(a, "root", b"another"))
    damaged(lambda cache, a, b: setattr(a, "published_blocks", 2))
    damaged(lambda cache, a, b: setattr(a, "block_table", []))


@pytest.mark.parametrize("seed", range(6))
def test_random_traffic_strands_nothing_and_leaks_nothing(make, seed):
    rng = random.Random(seed)
    cache = make(96)
    running: list[Sequence] = []
    seen_hits = 0
    for number in range(400):
        while running and (len(running) > 3 or rng.random() < 0.4):
            cache.release(running.pop(rng.randrange(len(running))))
        tokens = [*PREFIX[: rng.randrange(21)], *[rng.randrange(3) for _ in range(rng.randrange(1, 9))]]
        sequence = request(f"{number}", tokens, salt=rng.choice([None, "x"]))
        found = start(cache, sequence)
        if found is not None:
            running.append(sequence)
            seen_hits += found
        assert cache.stranded_tokens() == 0
        cache.check_invariants(running)
    assert seen_hits > 1_000
    for sequence in running:
        cache.release(sequence)
    assert whole(cache)
