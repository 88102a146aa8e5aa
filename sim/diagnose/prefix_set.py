"""The longest prefix that a text has in common with any text before it: an infinite cache, byte by byte."""

from bisect import bisect_left


def common_prefix(one: bytes, other: bytes) -> int:
    """Length of the common prefix. Cost: a few comparisons of memory.

    >>> common_prefix(b"abcde", b"abXde"), common_prefix(b"ab", b"abc"), common_prefix(b"", b"a")
    (2, 2, 0)
    """
    low, high = 0, min(len(one), len(other))
    if one[:high] == other[:high]:
        return high
    step = 64
    while low + step < high and one[low : low + step] == other[low : low + step]:
        low += step
        step *= 2
    high = min(high, low + step)
    while low + 1 < high:
        middle = (low + high) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low + (one[low : low + 1] == other[low : low + 1] and low < high)


class PrefixSet:
    """Texts in order: of all, the neighbours of a text have the longest prefix in common with it."""

    __slots__ = ("_numbers", "_texts")

    def __init__(self) -> None:
        self._texts: list[bytes] = []
        self._numbers: list[int] = []

    def add(self, text: bytes, number: int, stored: bytes | None = None) -> tuple[int, int | None]:
        """(bytes in common with the most similar earlier text, its number), and keep ``text`` as ``number``.

        ``stored`` is kept instead, if given: the text and what was answered. Of equally similar texts it is
        the one before in order. Cost: ``log n`` comparisons and an insertion.

        >>> known = PrefixSet()
        >>> known.add(b"abc", 0), known.add(b"abd", 1), known.add(b"xyz", 2), known.add(b"abcq", 3)
        ((0, None), (2, 0), (0, 1), (3, 0))
        """
        at = bisect_left(self._texts, text)
        best: tuple[int, int | None] = (0, None)
        for place in (at - 1, at):
            if 0 <= place < len(self._texts):
                common = common_prefix(text, self._texts[place])
                if best[1] is None or common > best[0]:
                    best = (common, self._numbers[place])
        if stored is not None:
            text, at = stored, bisect_left(self._texts, stored)
        self._texts.insert(at, text)
        self._numbers.insert(at, number)
        return best
