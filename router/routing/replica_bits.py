"""Sets of replicas as the bits of an integer."""

from collections.abc import Iterator


def bits(mask: int) -> Iterator[int]:
    """The replicas in ``mask``, the lowest first.

    >>> list(bits(0b10110))
    [1, 2, 4]
    """
    while mask:
        low = mask & -mask
        yield low.bit_length() - 1
        mask ^= low
