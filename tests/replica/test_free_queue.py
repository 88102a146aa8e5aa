"""The free queue: cases Q1 to Q8 of the portable conformance list."""

import doctest

import pytest

from replica.kv_cache import free_queue as module
from replica.kv_cache.block import Block
from replica.kv_cache.free_queue import FreeQueue


def blocks(count):
    return [Block(number) for number in range(count)]


def numbers(queue):
    queue.check_invariants()
    return [block.number for block in queue]


def test_doctests():
    assert doctest.testmod(module).failed == 0


def test_q1_one_block():
    (block,) = blocks(1)
    queue = FreeQueue([block])
    assert numbers(queue) == [0] and len(queue) == 1
    assert queue.take(1) == [block] and numbers(queue) == []


def test_q2_take_remove_append():
    b = blocks(5)
    queue = FreeQueue(b)
    assert queue.take(1) == [b[0]]
    queue.remove(b[2])
    assert numbers(queue) == [1, 3, 4]
    queue.append([b[2]])
    queue.append([b[0]])
    assert numbers(queue) == [1, 3, 4, 2, 0]


def test_q3_append_several():
    b = blocks(6)
    queue = FreeQueue([])
    queue.append([])
    assert numbers(queue) == []
    queue.append([b[0]])
    queue.append([b[4], b[5]])
    queue.append([])
    queue.append(b[1:4])
    assert numbers(queue) == [0, 4, 5, 1, 2, 3]


def test_q4_prepend_several():
    b = blocks(6)
    queue = FreeQueue([b[0]])
    queue.prepend([])
    queue.prepend([b[4], b[5]])
    queue.prepend([b[1], b[2]])
    assert numbers(queue) == [1, 2, 4, 5, 0]
    assert [queue.take(1)[0].number for _ in range(5)] == [1, 2, 4, 5, 0]


def test_q5_take_several_and_taken_blocks_are_unlinked():
    b = blocks(6)
    queue = FreeQueue([b[1], b[3], b[5], b[4], b[0], b[2]])
    assert queue.take(0) == []
    for count, expected in ((1, [1]), (2, [3, 5]), (3, [4, 0, 2])):
        taken = queue.take(count)
        assert [block.number for block in taken] == expected
        assert all(block.next is block and block.previous is block for block in taken)
        queue.check_invariants()


@pytest.mark.parametrize("count", [1, 2, 16])
def test_q6_drained_and_filled_again(count):
    b = blocks(count)
    queue = FreeQueue(b)
    for _ in range(3):
        assert queue.take(count) == b
        assert numbers(queue) == []
        queue.append(b)
        assert numbers(queue) == list(range(count))


def test_q7_taking_too_many_raises_and_changes_nothing():
    queue = FreeQueue(blocks(2))
    with pytest.raises(IndexError, match="3 free blocks wanted, 2 there"):
        queue.take(3)
    assert numbers(queue) == [0, 1]


def test_q7_removing_what_is_not_there_raises():
    b = blocks(2)
    queue = FreeQueue(b[:1])
    with pytest.raises(ValueError, match="block 1 is not"):
        queue.remove(b[1])
    assert numbers(queue) == [0]


def test_a_block_cannot_be_queued_twice():
    b = blocks(2)
    queue = FreeQueue(b)
    for put in (queue.append, queue.prepend):
        with pytest.raises(ValueError, match="already"):
            put([b[1]])
    other = FreeQueue([])
    with pytest.raises(ValueError, match="already"):
        other.append([Block(9), b[0]])


def test_q8_listing_after_every_kind_of_change():
    b = blocks(5)
    queue = FreeQueue(b)
    assert numbers(queue) == [0, 1, 2, 3, 4]
    queue.take(1)
    queue.remove(b[3])
    assert numbers(queue) == [1, 2, 4]
    queue.append([b[3]])
    queue.prepend([b[0]])
    assert numbers(queue) == [0, 1, 2, 4, 3]
