"""Runs of chained block keys. Because a key names its whole prefix, two runs are compared at few places."""

from collections.abc import Sequence
from typing import Any


def listed(keys: Sequence[int]) -> list[int]:
    """As what is read fastest; prompts have it."""
    return keys if isinstance(keys, list) else list(keys)


def common_keys(run: Any, keys: list[Any], depth: int, length: int) -> int:
    """How many keys of ``run`` equal those of ``keys`` from ``depth``; the first is known to. Bisects.

    Keys are compared as objects: compiled, numbers of 64 bits are slower.
    """
    most = min(len(run), length - depth)
    if run[most - 1] == keys[depth + most - 1]:
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == keys[depth + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low
