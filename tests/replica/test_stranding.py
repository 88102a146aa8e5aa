"""Stranding: memory that holds KV nobody can hit any more, because what came before it was reused first."""

import random

import pytest

from replica.kv_cache.prefix_cache import PrefixCache
from replica.kv_cache.radix_cache import RadixCache
from tests.replica.cache_steps import request, start

CAPACITY = 2_048


class HeadFirst(PrefixCache):
    """A block cache that frees a sequence's blocks in the order of its table."""

    def release(self, sequence):
        sequence.block_table.reverse()
        super().release(sequence)


class AnyOrder(PrefixCache):
    """A block cache that frees a sequence's blocks in no order."""

    def release(self, sequence):
        random.Random(len(sequence.block_table)).shuffle(sequence.block_table)
        super().release(sequence)


def conversations(cache, turns=600):
    """Four growing conversations over one system prompt take turns in memory for half of them.

    Returns the share of prompt tokens that were hit, and the share of memory stranded, mean and worst.
    """
    rng = random.Random(3)
    texts = [[*range(64), 1_000 + number] for number in range(4)]
    asked = hits = total = worst = 0
    for _ in range(turns):
        text = texts[rng.randrange(4)]
        if len(text) > 1_500:
            del text[65:]  # this user begins a new one
            text[64] += 100
        text += [rng.randrange(10_000) for _ in range(rng.randrange(50, 150))]
        sequence = request("turn", text)
        hits += start(cache, sequence)
        asked += len(text)
        cache.release(sequence)
        stranded = cache.stranded_tokens()
        total += stranded
        worst = max(worst, stranded)
    return hits / asked, total / turns / CAPACITY, worst / CAPACITY


@pytest.mark.parametrize("make", [PrefixCache, RadixCache])
def test_tail_first_strands_nothing(make):
    hits, stranded, worst = conversations(make(CAPACITY // 16, 16))
    assert stranded == worst == 0 and hits == pytest.approx(0.54, abs=0.005)


@pytest.mark.parametrize("make", [HeadFirst, AnyOrder])
def test_other_orders_strand_a_quarter_of_the_memory_and_lose_a_fifth_of_the_hits(make):
    hits, stranded, worst = conversations(make(CAPACITY // 16, 16))
    assert stranded > 0.2 and worst > 0.6 and hits < 0.8 * 0.54


def test_a_stranded_block_is_counted_while_it_is_there():
    cache = HeadFirst(4, 4)
    a = request("a", range(16))
    start(cache, a)
    cache.release(a)
    assert cache.stranded_tokens() == 0
    b = request("b", [99] * 4)  # takes a's first block
    start(cache, b)
    assert cache.stranded_tokens() == 12 and cache.match(request("c", range(16))) == []
    cache.release(b)
    with pytest.raises(AssertionError, match="reused before its continuation"):
        cache.check_invariants([])
