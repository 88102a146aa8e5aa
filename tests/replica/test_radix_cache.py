"""The radix cache beyond the contract: token-level hits, one copy, page alignment, eviction orders, a twin.

Cases of the radix list of docs/conformance.md are named test_r_, its invariants test_invariant_ with their
letter.
"""

import doctest
import random

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.kv_cache import radix_cache as module
from replica.kv_cache.eviction_order import eviction_order
from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from replica.sequence import Sequence
from tests.replica.cache_steps import compute, hit, request, run, start, whole


def test_doctests():
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("tokens", range(1, 11))
def test_a_full_hit_recomputes_one_token(tokens):
    cache = RadixCache(20)
    run(cache, request("a", range(10)))
    assert run(cache, request("b", range(tokens))) == tokens - 1


@pytest.mark.parametrize(("page", "tokens", "found"), [(1, 5, 5), (2, 5, 4), (4, 6, 4)])
def test_r_page_alignment(page, tokens, found):
    cache = RadixCache(40 // page, page)
    run(cache, request("a", range(tokens)))
    assert hit(cache, range(tokens)) == found and cache.tree.cached * page == found
    run(cache, request("b", [*range(tokens - 1), 9, 9, 9, 9]))  # parts inside the last page
    assert cache.tree.cached * page == {1: 9, 2: 4 + 4, 4: 4 + 4}[page]
    assert whole(cache)


@pytest.mark.parametrize("page", [1, 2])
def test_r_lookups_that_split_change_neither_totals_nor_values(page):
    cache = RadixCache(64, page)
    texts = [[*range(1, 17)], [1, 2, 3, 4, 17, 18, 19, 20], [*range(1, 9), 30, 31]]
    for text in texts:
        run(cache, request("a", [*text, 0]))
    total = cache.tree.cached
    slots = {str(text): start_table(cache, text) for text in texts}
    nodes = cache.tree.nodes
    for tokens in (3, 7, 11, 2):
        run(cache, request("probe", range(1, tokens + 1)))
    assert cache.tree.nodes > nodes and cache.tree.cached == total
    assert {str(text): start_table(cache, text) for text in texts} == slots
    assert whole(cache)


def start_table(cache, text):
    pin = request("pin", [*text, 0])
    cache.hold(pin, cache.match(pin))
    table = pin.block_table
    cache.release(pin)
    return table


def test_r_what_was_computed_twice_is_kept_once():
    """Free counts as slots are exchanged: the second copy goes as soon as it is published."""
    cache = RadixCache(40)
    a, b = request("a", [1, 2, 3, 4, 5, 6]), request("b", [1, 2, 3, 4, 7, 8, 9])
    for sequence in (a, b):
        cache.adopt(sequence, cache.match(sequence))
    assert cache.free_blocks == 40 - 13
    compute(cache, a)
    own = list(b.block_table)
    compute(cache, b, 3)  # a chunk of three tokens that a has computed too
    assert cache.free_blocks == 40 - 10 and b.block_table == a.block_table[:3] + own[3:]
    compute(cache, b, 7)  # one more of a's, then three of its own
    assert cache.free_blocks == 40 - 9 and b.block_table == a.block_table[:4] + own[4:]
    cache.check_invariants([a, b])
    cache.release(a)
    assert cache.tree.evictable == 2  # 5 and 6; b holds the rest
    cache.release(b)
    assert cache.tree.cached == 9 and whole(cache)


def test_r_page_hashes_are_chained_and_split_with_their_node():
    cache = RadixCache(40, 2, record_events=True)
    run(cache, request("a", [1, 2, 3, 4, 1, 2, 3, 4]))
    (stored,) = cache.take_events()
    assert len(set(stored.block_hashes)) == 4 and stored.block_hashes == tuple(
        chain([1, 2, 3, 4, 1, 2, 3, 4], 2, root_hash())
    )
    run(cache, request("b", [1, 2, 3, 4, 9, 9]))
    lengths = sorted(len(node.hashes) for node in cache.tree.walk() if node.parent)
    assert lengths == [1, 2, 2]  # [9 9], [1 2 3 4] and the rest of the first
    (stored,) = cache.take_events()
    assert stored.parent_hash == chain([1, 2, 3, 4], 2, root_hash())[-1]
    assert whole(cache)


def test_r_event_hashes_differ_across_namespaces():
    cache = RadixCache(40, 2, record_events=True)
    for options in ({}, {"salt": "one"}, {"salt": "two"}, {"adapter": "one"}):
        run(cache, request("a", [1, 2, 3, 4], **options))
    hashes = [event.block_hashes for event in cache.take_events()]
    assert len({block_hash for run_of in hashes for block_hash in run_of}) == 8


def test_r_a_common_prefix_is_stored_once():
    cache = RadixCache(20_000)
    prefix = list(range(1_000, 2_000))
    for number in range(500):
        run(cache, request("a", [*prefix, number, number + 1, number + 2]))
    assert cache.tree.cached == 1_000 + 500 * 3
    assert whole(cache)


def test_event_blocks_may_be_larger_than_a_page():
    cache = RadixCache(60, 1, record_events=True, event_block_size=4)
    run(cache, request("a", range(11)))
    (stored,) = cache.take_events()
    assert stored == BlocksStored(tuple(chain(range(11), 4, root_hash())), None, tuple(range(8)), 4)
    run(cache, request("b", [*range(11), 50, 60]))  # the third block is whole now
    (stored,) = cache.take_events()
    assert stored.token_ids == (8, 9, 10, 50) and stored.parent_hash == chain(range(8), 4, root_hash())[-1]
    run(cache, request("c", [9] * 56, reads_cache=False))  # 4 of 60 are left: of block 0
    assert cache.take_events()[0] == BlocksRemoved(tuple(chain([*range(11), 50], 4, root_hash())[:0:-1]))
    assert hit(cache, range(11)) == 4


@pytest.mark.parametrize("size", [3, 0, 5])
def test_event_blocks_are_whole_pages(size):
    if size == 0:
        assert RadixCache(4, 2, event_block_size=None).tree is not None
        return
    with pytest.raises(ValueError, match="multiple of 2"):
        RadixCache(4, 2, event_block_size=size)


def test_ids_with_larger_event_blocks_are_named_by_their_last_id():
    cache = RadixCache(60, 4, record_events=True, event_block_size=8)
    a = Sequence.of_blocks("a", [1, 2, 3, 4, 5], 20, 1, block_size=4)
    run(cache, a)
    assert cache.take_events() == [BlocksStored((2, 4), None, (), 8)]


# Orders of eviction


def left_of(order, uses, capacity=40, **options):
    """Prompts of (name, tokens, times used) come one after the other; tokens of each left at the end."""
    cache = RadixCache(capacity, eviction=order, **options)
    texts = {}
    for place, (name, tokens, times) in enumerate(uses):
        texts[name] = [1_000 * (place + 1) + at for at in range(tokens)]
        for _ in range(times):
            run(cache, request(name, texts[name]))
            cache.check_invariants([])
    return {name: hit(cache, text) for name, text in texts.items()}


SCAN = [("hot", 10, 3), ("cold", 10, 1), ("scan1", 10, 1), ("scan2", 10, 1), ("scan3", 10, 1)]


def test_lru_forgets_what_was_used_longest_ago():
    assert left_of("lru", SCAN) == {"hot": 0, "cold": 10, "scan1": 10, "scan2": 10, "scan3": 10}


@pytest.mark.parametrize("order", ["slru", "lfu"])
def test_slru_and_lfu_keep_what_was_used_twice_through_a_scan(order):
    assert left_of(order, SCAN) == {"hot": 10, "cold": 0, "scan1": 10, "scan2": 10, "scan3": 10}


def test_lfu_weighs_how_often_and_slru_only_whether():
    uses = [("often", 10, 5), ("twice", 10, 2), ("also twice", 20, 2), ("new", 10, 1)]
    assert left_of("slru", uses)["often"] == 0 and left_of("slru", uses)["twice"] == 10
    assert left_of("lfu", uses)["often"] == 10 and left_of("lfu", uses)["twice"] == 0


def test_tlru_takes_from_every_conversation_what_it_can_recompute_in_time():
    uses = [("a", 10, 1), ("b", 10, 1), ("c", 10, 1), ("d", 10, 1), ("e", 8, 1)]
    assert left_of("lru", uses) == {"a": 2, "b": 10, "c": 10, "d": 10, "e": 8}
    # A slack of 2 tokens: two from each before a loses the other eight.
    assert left_of("tlru", uses, tail_slack_tokens=2) == {"a": 8, "b": 8, "c": 8, "d": 8, "e": 8}
    more = [*uses, ("f", 4, 1)]
    assert left_of("tlru", more, tail_slack_tokens=2) == {"a": 6, "b": 8, "c": 8, "d": 8, "e": 6, "f": 4}


def test_tlru_starts_anew_when_a_conversation_comes_back():
    cache = RadixCache(20, eviction="tlru", tail_slack_tokens=3)
    a, b = list(range(10)), list(range(100, 110))
    run(cache, request("a", a))
    run(cache, request("b", b))
    run(cache, request("x", [7, 7, 7], salt="x"))
    assert (hit(cache, a), hit(cache, b)) == (7, 10)  # the slack of a, who is older
    run(cache, request("a", a))  # recomputes 3, for which b gives its slack
    assert (hit(cache, a), hit(cache, b)) == (10, 7)
    run(cache, request("y", [8] * 5, salt="y"))  # the three of x, who is older, then of a: b has none left
    assert (hit(cache, a), hit(cache, b)) == (8, 7)


def test_tlru_remembers_what_a_shared_prefix_has_lost_below_it():
    cache = RadixCache(50, eviction="tlru", tail_slack_tokens=12)
    shared, other = list(range(10)), list(range(100, 120))
    for branch in (50, 60):
        run(cache, request("branch", [*shared, *range(branch, branch + 10)]))
    run(cache, request("other", other))
    run(cache, request("x", [7] * 24, salt="x"))
    # Both branches went; of the twelve that a conversation over the prefix may lose ten are lost already.
    assert (hit(cache, shared), hit(cache, other)) == (8, 18)


def test_unknown_orders_are_refused():
    with pytest.raises(ValueError, match="lru, slru, lfu or tlru"):
        eviction_order("mru")
    with pytest.raises(ValueError, match="at least 1"):
        RadixCache(10, eviction="tlru")
    with pytest.raises(ValueError, match="at least 1"):
        RadixCache(10, 16, eviction="tlru", tail_slack_tokens=15)  # less than a page


# Two back ends, one oracle


@pytest.mark.parametrize(("blocks", "seed"), [(4_000, 0), (24, 1), (24, 2), (13, 3), (40, 4)])
def test_invariant_j_radix_and_block_cache_hit_alike(blocks, seed):
    """One request at a time, page = block: equal hits and equal evictions in equal order.

    Under pressure only if nothing is computed twice, because the block cache keeps both copies.
    """
    rng = random.Random(seed)
    caches = [make(blocks, 4, record_events=True) for make in (PrefixCache, RadixCache)]
    hits = 0
    for number in range(600):
        stem = [rng.randrange(3)] * rng.choice([0, 4, 7, 8, 16])
        tokens = [*stem, *[rng.randrange(2) for _ in range(rng.randrange(1, 20))]]
        pressure = blocks < 1_000
        if pressure and len(tokens) % 4 == 0:
            tokens.append(5)  # or the last block, never hit whole, would be computed twice
        salt = rng.choice([None, None, "x"])
        found, sets = [], []
        for cache in caches:
            sequence = request(f"{number}", tokens, salt=salt)
            found.append(start(cache, sequence))
            if found[-1] is not None:
                for token in range(number % 6):  # some output
                    sequence.token_ids.append(100 * number + token if pressure else token)
                    sequence.output_tokens += 1
                    if cache.extend(sequence):
                        compute(cache, sequence)
                cache.release(sequence)
            sets.append(set(cache.cached_hashes()))
            if pressure or number % 50 == 0:
                cache.check_invariants([])
        assert found[0] == found[1] and sets[0] == sets[1]
        hits += found[0] or 0
        told = [cache.take_events() for cache in caches]
        assert gone(told[0]) == gone(told[1])
    assert hits > 500


def gone(events):
    return [block_hash for e in events if isinstance(e, BlocksRemoved) for block_hash in e.block_hashes]


def test_a_token_page_never_hits_less_than_a_block():
    rng = random.Random(7)
    coarse, fine = PrefixCache(1_000, 16), RadixCache(16_000, 1)
    gain = 0
    for number in range(200):
        tokens = [*range(rng.randrange(80)), *[rng.randrange(200, 300) for _ in range(rng.randrange(1, 40))]]
        found = [run(cache, request(f"{number}", tokens)) for cache in (coarse, fine)]
        assert found[1] >= found[0]
        gain += found[1] - found[0]
    assert gain > 200


def test_b085_shared_prefixes_add_up_when_idle():
    cache = RadixCache(64)
    for turn in range(200):
        held = [request(name, text) for name, text in SHARED.items()]
        for sequence in held:
            start(cache, sequence)
        cache.check_invariants(held)
        random.Random(turn).shuffle(held)
        for sequence in held:
            cache.release(sequence)
        assert whole(cache)


SHARED = {"A": [1, 2, 3], "AB": [1, 2, 3, 4, 5], "AC": [1, 2, 3, 6], "ABD": [1, 2, 3, 4, 5, 7, 8]}
