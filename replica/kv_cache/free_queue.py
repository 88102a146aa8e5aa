"""The order in which free blocks are reused: an intrusive doubly linked list, O(1) for each block moved."""

from collections.abc import Iterable, Iterator

from replica.kv_cache.block import Block


class FreeQueue:
    """Blocks nobody holds, the next to be reused first. Links live in the blocks themselves.

    The list is a ring closed by one sentinel; a block outside the queue links to itself.

    >>> a, b, c = Block(0), Block(1), Block(2)
    >>> queue = FreeQueue([a, b])
    >>> queue.prepend([c]); queue.remove(a); queue.append([a])
    >>> [block.number for block in queue]
    [2, 1, 0]
    >>> [block.number for block in queue.take(2)], len(queue)
    ([2, 1], 1)
    """

    __slots__ = ("_end", "_length")

    def __init__(self, blocks: Iterable[Block] = ()) -> None:
        self._end = Block(-1)
        self._length = 0
        self.append(blocks)

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Block]:
        block = self._end.next
        while block is not self._end:
            yield block
            block = block.next

    def take(self, count: int) -> list[Block]:
        """Remove the first ``count`` blocks. Raises IndexError, changing nothing, when there are fewer."""
        if count > self._length:
            raise IndexError(f"{count} free blocks wanted, {self._length} there")
        taken = []
        end = self._end
        block = end.next
        for _ in range(count):
            taken.append(block)
            following = block.next
            block.next = block.previous = block
            block = following
        end.next = block
        block.previous = end
        self._length -= count
        return taken

    def remove(self, block: Block) -> None:
        """Take one block out of the middle. Raises ValueError when it is not in a queue."""
        if block.next is block:
            raise ValueError(f"block {block.number} is not in the free queue")
        block.previous.next = block.next
        block.next.previous = block.previous
        block.next = block.previous = block
        self._length -= 1

    def append(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the back, in the given order: the last is reused last."""
        end = self._end
        last = end.previous
        for block in blocks:
            if block.next is not block:
                raise ValueError(f"block {block.number} is already in the free queue")
            block.previous = last
            last.next = block
            # Linked both ways at every turn, so that a repeated block is noticed.
            block.next = end
            last = block
            self._length += 1
        end.previous = last

    def prepend(self, blocks: Iterable[Block]) -> None:
        """Put blocks at the front, in the given order: the first is reused next."""
        following = self._end.next
        before = self._end
        for block in blocks:
            if block.next is not block:
                raise ValueError(f"block {block.number} is already in the free queue")
            block.previous = before
            before.next = block
            block.next = following
            before = block
            self._length += 1
        following.previous = before

    def check_invariants(self) -> None:
        """Raise AssertionError unless the ring is whole in both directions and its length is right."""
        forward = list(self)
        assert len(forward) == self._length, (len(forward), self._length)
        backward = []
        block = self._end.previous
        while block is not self._end:
            backward.append(block)
            block = block.previous
        assert backward == forward[::-1], "free queue differs read backwards"
