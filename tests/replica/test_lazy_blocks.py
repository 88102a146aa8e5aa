"""A pool that makes its blocks when they are first used hands out the same blocks as one that made all."""

import random

import pytest

from replica.kv_cache import block_pool
from replica.kv_cache.block_pool import BlockPool


def history(pool: BlockPool, seed: int, steps: int = 400) -> list[list[int]]:
    """Blocks taken by sequences that come, share, go and are forgotten, in order."""
    rng = random.Random(seed)
    tables: list[list[int]] = []
    taken = []
    key = 0
    for _ in range(steps):
        draw = rng.random()
        if draw < 0.55:
            count = min(rng.randrange(1, 12), pool.free_blocks)
            numbers = pool.take(count)
            taken.append(numbers)
            for number in numbers[: rng.randrange(count + 1)]:
                key += 1
                pool.store(number, key, b"root", key)
            if numbers:
                tables.append(numbers)
        elif draw < 0.9 and tables:
            pool.release(tables.pop(rng.randrange(len(tables))))
        elif draw < 0.98:
            cached = [block.number for block in pool.free if block.key is not None]
            if cached:
                numbers = rng.sample(cached, min(3, len(cached)))
                pool.touch(numbers)
                tables.append(numbers)
        elif rng.random() < 0.2:
            while tables:
                pool.release(tables.pop())
            assert pool.forget_all()
    return taken


@pytest.mark.parametrize("seed", range(12))
def test_the_same_blocks_in_the_same_order(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    size = random.Random(seed).randrange(20, 400)
    whole = BlockPool(size)
    assert len(whole.blocks) == size
    monkeypatch.setattr(block_pool, "MADE_AT_ONCE", 7)
    lazy = BlockPool(size)
    assert len(lazy.blocks) == 7 and lazy.free_blocks == size
    # Only blocks that exist can be looked at: `history` never looks further.
    assert history(lazy, seed) == history(whole, seed)
    lazy.check_invariants()
    assert lazy.free_blocks == whole.free_blocks


def test_too_many_are_refused_before_any_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_pool, "MADE_AT_ONCE", 4)
    pool = BlockPool(10)
    with pytest.raises(IndexError, match="11 free blocks wanted, 10 there"):
        pool.take(11)
    assert len(pool.blocks) == 4
    assert pool.take(10) == list(range(10))
    assert pool.free_blocks == 0


def test_a_large_pool_costs_what_is_used() -> None:
    pool = BlockPool(1_000_000)
    pool.take(100)
    assert len(pool.blocks) <= 2 * block_pool.MADE_AT_ONCE
