"""All caches: what they tell of blocks stored, removed and evicted."""

import pytest

from replica.contract.block_hash import chain, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.sequence import Sequence
from tests.replica.cache_steps import PREFIX, compute, request, run, start, whole
from tests.replica.caches import CACHES, PAGE


@pytest.fixture(params=CACHES)
def make(request):
    return CACHES[request.param]


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
