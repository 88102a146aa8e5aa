"""One contract for all caches: the life of a sequence, whichever cache the scheduler was given."""

import doctest

import pytest

from replica.kv_cache import cache, cache_record
from tests.replica.cache_steps import PREFIX, compute, hit, request, run, start, whole
from tests.replica.caches import CACHES, snapshot


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


@pytest.mark.parametrize("module", [cache, cache_record])
def test_doctests(module):
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
