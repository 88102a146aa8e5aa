"""The block pool: copies, eviction, double release, verified walks, and the worth of its order."""

import doctest
import random

import pytest

from replica.contract.kv_events import BlocksRemoved, CacheCleared
from replica.kv_cache import block_pool as module
from replica.kv_cache.block_pool import BlockPool

ROOT = b"root"


def free(pool):
    pool.check_invariants()
    return [block.number for block in pool.free]


def store_chain(pool, numbers, names, parent=ROOT):
    """Store blocks as a chain; key and content of each are its name."""
    for number, name in zip(numbers, names, strict=True):
        pool.store(number, name, parent, name)
        parent = pool.blocks[number].identity


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_m5_a_reused_block_forgets_what_it_held():
    pool = BlockPool(1)
    pool.take(1)
    pool.store(0, b"k", ROOT, b"c")
    pool.release([0])
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [0]
    assert pool.take(1) == [0]
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [] and pool.blocks[0].key is None
    pool.check_invariants()


def test_m14_copies_are_kept_until_the_last_one_goes():
    events = []
    pool = BlockPool(3, events)
    pool.take(3)
    assert pool.store(0, b"k", ROOT, b"c") is True
    assert pool.store(1, b"other", ROOT, b"d") is True
    assert pool.store(2, b"k", ROOT, b"c") is False
    assert pool.blocks[0].identity == pool.blocks[2].identity
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [0]  # the oldest
    pool.release([0])
    pool.take(1)
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [2] and events == []
    pool.release([2])
    pool.take(1)
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [] and events == [BlocksRemoved((b"k",))]
    assert list(pool.cached_keys) == [b"other"]
    pool.check_invariants()


def test_the_middle_copy_of_three_can_go():
    pool = BlockPool(3)
    pool.take(3)
    for number in range(3):
        pool.store(number, b"k", ROOT, b"c")
    for gone, left in ((1, 0), (0, 2)):
        pool.release([gone])
        assert pool.take(1) == [gone]
        assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [left]
        pool.check_invariants()


def test_a_continuation_hangs_on_the_prefix_and_not_on_one_copy_of_it():
    pool = BlockPool(3)
    pool.take(3)
    store_chain(pool, [0, 1], [b"a", b"b"])
    pool.store(2, b"a", ROOT, b"a")
    pool.release([0])
    assert pool.take(1) == [0]  # the copy under which b was stored is gone
    assert pool.walk(ROOT, [b"a", b"b"], [b"a", b"b"], 2) == [2, 1]


def test_a_colliding_key_is_no_hit():
    pool = BlockPool(4)
    pool.take(4)
    pool.store(0, b"k", ROOT, b"mine")
    pool.store(1, b"k", ROOT, b"yours")
    assert pool.walk(ROOT, [b"k"], [b"yours"], 1) == [1]
    assert pool.walk(ROOT, [b"k"], [b"nobody's"], 1) == []
    assert pool.walk(b"another root", [b"k"], [b"mine"], 1) == []
    # Equal content and key under different parents: only the own continuation.
    pool.store(2, b"k", pool.blocks[0].identity, b"next")
    pool.store(3, b"k", pool.blocks[1].identity, b"next")
    assert pool.walk(ROOT, [b"k", b"k"], [b"mine", b"next"], 2) == [0, 2]
    assert pool.walk(ROOT, [b"k", b"k"], [b"yours", b"next"], 2) == [1, 3]
    pool.check_invariants()


def test_a_parent_that_came_back_is_not_the_parent_that_left():
    """Block 0 is reused for another prefix with the same key: its old continuation must not follow it."""
    pool = BlockPool(2)
    pool.take(2)
    store_chain(pool, [0, 1], [b"a", b"b"])
    pool.release([0])
    pool.take(1)
    pool.store(0, b"a", ROOT, b"different content")
    assert pool.walk(ROOT, [b"a", b"b"], [b"different content", b"b"], 2) == [0]


def test_double_release_is_refused():
    pool = BlockPool(2)
    pool.take(1)
    pool.release([0])
    with pytest.raises(ValueError, match="nobody holds"):
        pool.release([0])


def test_only_held_and_uncached_blocks_can_be_stored():
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="cannot be stored"):
        pool.store(0, b"k", ROOT, b"c")
    pool.take(1)
    pool.store(0, b"k", ROOT, b"c")
    with pytest.raises(ValueError, match="cannot be stored"):
        pool.store(0, b"k2", ROOT, b"c")


def test_evictions_of_one_taking_are_one_event_in_order_of_eviction():
    events = []
    pool = BlockPool(4, events)
    pool.take(3)
    store_chain(pool, [0, 1, 2], [b"a", b"b", b"c"])
    pool.release([0, 1, 2])
    assert pool.take(3) == [3, 2, 1]
    assert events == [BlocksRemoved((b"c", b"b"))]


def test_forgetting_needs_every_block_free():
    events = []
    pool = BlockPool(2, events)
    pool.take(1)
    pool.store(0, b"k", ROOT, b"c")
    assert pool.forget_all() is False and events == []
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [0]
    pool.release([0])
    assert pool.forget_all() is True and events == [CacheCleared()]
    assert pool.walk(ROOT, [b"k"], [b"c"], 1) == [] and list(pool.cached_keys) == []
    pool.check_invariants()


def random_conversations(release_order):
    """Chains with shared prefixes come and go in a small pool; the largest number of stranded blocks seen."""
    rng = random.Random(1)
    pool = BlockPool(24)
    worst = 0
    for _ in range(300):
        names = [bytes([rng.randrange(2)]) for _ in range(rng.randrange(1, 8))]
        names = [b"/".join(names[: depth + 1]) for depth in range(len(names))]
        found = pool.walk(ROOT, names, names, len(names))
        pool.touch(found)
        table = found + pool.take(len(names) - len(found))
        parent = pool.blocks[found[-1]].identity if found else ROOT
        store_chain(pool, table[len(found) :], names[len(found) :], parent)
        pool.release(release_order(table))
        worst = max(worst, pool.stranded_blocks())
    return worst


def test_tail_before_head_strands_nothing_and_head_before_tail_does():
    assert random_conversations(lambda table: table) == 0
    assert random_conversations(lambda table: table[::-1]) > 0


def test_a_pool_needs_a_block():
    with pytest.raises(ValueError, match="at least 1"):
        BlockPool(0)


def test_check_invariants_finds_damage():
    def damaged(damage):
        pool = BlockPool(4)
        pool.take(3)
        store_chain(pool, [0, 1], [b"a", b"b"])
        pool.release([0])
        damage(pool)
        with pytest.raises(AssertionError):
            pool.check_invariants()

    damaged(lambda pool: setattr(pool.blocks[0], "references", 1))
    damaged(lambda pool: setattr(pool.blocks[1], "references", 0))
    damaged(lambda pool: setattr(pool.blocks[1], "key", None))
    damaged(lambda pool: setattr(pool.blocks[2], "key", b"unlisted"))
    damaged(lambda pool: setattr(pool.blocks[1], "identity", pool.blocks[0].identity))
    damaged(lambda pool: setattr(pool.blocks[1], "parent", 999))
