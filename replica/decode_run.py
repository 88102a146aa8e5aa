"""Arithmetic of many identical decode steps: when each running sequence takes or publishes a block.

Step ``j`` (from 1) of a sequence that knows ``total`` tokens now computes position ``total + j - 2``, so it
first needs block ``b`` in step ``b * size + 2 - total`` and has filled it after step
``(b + 1) * size + 1 - total``.
"""

from collections.abc import Sequence as Sequences
from typing import Any, NamedTuple

from replica.kv_cache.cache import Cache
from replica.sequence import Sequence


class Change(NamedTuple):
    """What happens to the cache in one of the steps. Sorted, changes are in the order of single steps."""

    step: int
    publishes: bool
    """False: takes the block, before the step. True: publishes it, after the step."""
    row: int
    block: int
    """Place in the sequence's block table."""


def blocks_wanted(running: Sequences[Sequence], cache: Cache[Any], steps: int) -> int:
    """New blocks that ``steps`` decode steps take together."""
    wanted = 0
    for sequence in running:
        tokens = sequence.prompt_tokens + sequence.output_tokens + steps - 1
        wanted += max(0, cache.blocks_for(tokens) - len(sequence.block_table))
    return wanted


def steps_that_fit(running: Sequences[Sequence], cache: Cache[Any], steps: int) -> int:
    """The most decode steps, at most ``steps``, for which the free blocks last."""
    at_most = len(running) * cache.blocks_for(steps)
    if at_most <= cache.free_blocks or blocks_wanted(running, cache, steps) <= cache.free_blocks:
        return steps
    fits, too_many = 0, steps
    while too_many - fits > 1:
        middle = (fits + too_many) // 2
        if blocks_wanted(running, cache, middle) <= cache.free_blocks:
            fits = middle
        else:
            too_many = middle
    return fits


def steps_until_publication(running: Sequences[Sequence], steps: int) -> int:
    """The step after which somebody publishes a block, at most ``steps``."""
    return min(steps, *(sequence.publish_at + 1 - sequence.total_tokens for sequence in running))


def changes(running: Sequences[Sequence], cache: Cache[Any], steps: int) -> list[Change]:
    """Every block taken or published in the next ``steps`` steps of sequences made of block ids, in order."""
    size = cache.block_size
    found = []
    for row, sequence in enumerate(running):
        total = sequence.prompt_tokens + sequence.output_tokens
        computed = total + steps - 1
        there = len(sequence.block_table)
        if computed > there * size:
            for block in range(there, cache.blocks_for(computed)):
                found.append(Change(block * size + 2 - total, False, row, block))
        if computed >= sequence.publish_at:
            named = min(len(sequence.block_hashes), computed // size)
            for block in range(sequence.published_blocks, named):
                found.append(Change((block + 1) * size + 1 - total, True, row, block))
    return sorted(found)
