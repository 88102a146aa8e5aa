"""What the prefix index costs in memory: bytes per block and replica, as ``tracemalloc`` counts them.

``python -m tests.router.test_index_memory`` prints them.
"""

import random
import tracemalloc
from array import array
from collections.abc import Callable, Iterator

import pytest

from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import UniformLayout

REPLICAS = 8
BOUND_BYTES = 60.0
ROOMY = 1_000_000_000
SMALL = 2_000
"""Blocks per replica: everything is evicted many times over."""

Uses = Iterator[tuple[int, "array[int]"]]
"""(replica, keys of the prompt it is sent)."""


def keys(rng: random.Random, blocks: int) -> "array[int]":
    """Keys of as many new blocks."""
    return array("Q", [rng.getrandbits(64) for _ in range(blocks)])


def unique(rng: random.Random, blocks: int, prompts: int) -> Uses:
    """Prompts that share nothing."""
    for _ in range(prompts):
        yield rng.randrange(REPLICAS), keys(rng, blocks)


def one_head(rng: random.Random, prompts: int) -> Uses:
    """Twenty system prompts of 6 blocks, 8 blocks of its own in each prompt, replicas at random."""
    heads = [keys(rng, 6) for _ in range(20)]
    for replica, own in unique(rng, 8, prompts):
        yield replica, rng.choice(heads) + own


def chats(rng: random.Random, turns: int) -> Uses:
    """Chats of 8 blocks that grow by 3; one turn in ten goes elsewhere than home."""
    open_chats: list[array[int]] = []
    for _ in range(turns):
        if not open_chats or rng.random() < 0.2:
            open_chats.append(keys(rng, 8))
        number = rng.randrange(len(open_chats))
        chat = open_chats[number]
        replica = number % REPLICAS if rng.random() < 0.9 else rng.randrange(REPLICAS)
        yield replica, chat
        chat += keys(rng, 3)


WORKLOADS: dict[str, Callable[[random.Random], Uses]] = {
    "8 blocks, nothing shared": lambda rng: unique(rng, 8, 12_000),
    "72 blocks, nothing shared": lambda rng: unique(rng, 72, 3_000),
    "a system prompt and 8 blocks": lambda rng: one_head(rng, 8_000),
    "chats, one turn in ten elsewhere": lambda rng: chats(rng, 8_000),
}


def bytes_per_block(uses: Uses, capacity: int) -> float:
    """The most at any time after the first 1,500 prompts: dictionaries grow by leaps."""
    index = PrefixIndex(REPLICAS, UniformLayout(1), capacity)
    most = taken = 0.0
    tracemalloc.start()
    try:
        for number, (replica, prompt) in enumerate(uses):
            before = tracemalloc.get_traced_memory()[0]
            index.insert(replica, prompt.tolist())
            taken += tracemalloc.get_traced_memory()[0] - before
            if number > 1_500:
                most = max(most, taken / sum(index.held(replica) for replica in range(REPLICAS)))
    finally:
        tracemalloc.stop()
    return most


@pytest.mark.parametrize("capacity", [ROOMY, SMALL], ids=["growing", "evicting"])
@pytest.mark.parametrize("workload", WORKLOADS)
def test_a_block_on_a_replica_costs_less_than_60_bytes(workload: str, capacity: int) -> None:
    assert 8.0 < bytes_per_block(WORKLOADS[workload](random.Random(1)), capacity) < BOUND_BYTES


if __name__ == "__main__":
    for name, workload in WORKLOADS.items():
        growing, evicting = (bytes_per_block(workload(random.Random(1)), room) for room in (ROOMY, SMALL))
        print(f"{name}: {growing:.1f} bytes per block and replica while growing, {evicting:.1f} when full")
