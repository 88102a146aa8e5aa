"""The prefix index against a naive model: same matches, bounded, tails before heads."""

import random

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import TEXT_LAYOUT, UniformLayout

REPLICAS = 3
ROOMY = 10_000


def chain(*names: int) -> list[int]:
    """Chained keys of the blocks ``names``: a key stands for its whole prefix, as real keys do."""
    keys, parent = [], 7
    for name in names:
        parent = hash((parent, name)) & 0xFFFF_FFFF_FFFF_FFFF
        keys.append(parent)
    return keys


class AgainstSets(RuleBasedStateMachine):
    """With room for everything, a replica holds exactly the union of what was inserted and not forgotten."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(REPLICAS, UniformLayout(1), ROOMY)
        self.model: list[set[int]] = [set() for _ in range(REPLICAS)]
        self.prompts: list[list[int]] = [[]]

    prompt = st.lists(st.integers(0, 2), min_size=1, max_size=12).map(lambda names: chain(*names))
    replica = st.integers(0, REPLICAS - 1)

    @rule(replica=replica, keys=prompt)
    def insert(self, replica: int, keys: list[int]) -> None:
        self.index.insert(replica, keys)
        self.model[replica].update(keys)
        self.prompts.append(keys)

    @rule(replica=replica, keys=prompt, blocks=st.integers(0, 12))
    def truncate(self, replica: int, keys: list[int], blocks: int) -> None:
        self.index.truncate(replica, keys, blocks)
        if blocks < len(keys):
            gone = keys[blocks]
            below = {k for p in self.prompts if gone in p for k in p[p.index(gone) :]} | {gone}
            self.model[replica] -= below

    @rule(replica=replica)
    def clear(self, replica: int) -> None:
        self.index.clear(replica)
        self.model[replica].clear()

    @rule(keys=prompt)
    def match(self, keys: list[int]) -> None:
        expected = []
        for held in self.model:
            count = 0
            while count < len(keys) and keys[count] in held:
                count += 1
            expected.append(count)
        assert self.index.match(keys) == expected

    @invariant()
    def whole(self) -> None:
        self.index.check_invariants()
        for replica, held in enumerate(self.model):
            assert self.index.held(replica) == len(held)


class Bounded(RuleBasedStateMachine):
    """With little room the index stays whole, within bounds, and prefers what was used last."""

    def __init__(self) -> None:
        super().__init__()
        self.index = PrefixIndex(REPLICAS, UniformLayout(1), 10)

    @rule(
        replica=st.integers(0, REPLICAS - 1),
        names=st.lists(st.integers(0, 2), min_size=1, max_size=9),
    )
    def insert(self, replica: int, names: list[int]) -> None:
        keys = chain(*names)
        self.index.insert(replica, keys)
        assert self.index.match(keys)[replica] == len(keys), "what was just inserted is held"

    @precondition(lambda self: self.index.held(0) > 0)
    @rule(units=st.integers(1, 12))
    def resize(self, units: int) -> None:
        self.index.set_capacity(0, max(9, units))

    @rule(replica=st.integers(0, REPLICAS - 1))
    def clear(self, replica: int) -> None:
        self.index.clear(replica)

    @rule(replica=st.integers(0, REPLICAS - 1), names=st.lists(st.integers(0, 2), min_size=1, max_size=9))
    def truncate(self, replica: int, names: list[int]) -> None:
        self.index.truncate(replica, chain(*names), len(names) // 2)

    @invariant()
    def whole(self) -> None:
        self.index.check_invariants()


TestAgainstSets = AgainstSets.TestCase
TestAgainstSets.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestBounded = Bounded.TestCase
TestBounded.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_tails_leave_before_heads_and_oldest_first() -> None:
    index = PrefixIndex(1, UniformLayout(1), 6)
    old, new = chain(1, 2, 3, 4), chain(1, 2, 8, 9)
    index.insert(0, old)
    index.insert(0, new)  # 1 2 shared; 3 4 8 9: six blocks
    index.insert(0, chain(1, 2, 8, 9, 10))
    assert index.match(old) == [3], "the old tail's last block made room"
    assert index.match(chain(1, 2, 8, 9, 10)) == [5]


def test_a_use_refreshes() -> None:
    index = PrefixIndex(1, UniformLayout(1), 4)
    first, second = chain(1, 2), chain(3, 4)
    index.insert(0, first)
    index.insert(0, second)
    index.insert(0, first)  # used again
    index.insert(0, chain(5))
    assert index.match(second) == [1]
    assert index.match(first) == [2]


def test_a_prompt_longer_than_the_cache_keeps_its_head() -> None:
    index = PrefixIndex(1, UniformLayout(1), 3)
    keys = chain(*range(10))
    index.insert(0, keys)
    assert index.match(keys) == [3]
    assert index.held(0) == 3


def test_text_blocks_count_in_bytes() -> None:
    index = PrefixIndex(2, TEXT_LAYOUT, 1_000_000)
    index.insert(1, chain(*range(33)))
    assert index.held(1) == 32 * 256 + 512


def test_memory_of_unique_prompts_is_bounded_at_insert() -> None:
    index = PrefixIndex(2, UniformLayout(16), 16 * 1_000)
    rng = random.Random(1)
    for _ in range(2_000):
        index.insert(rng.randrange(2), chain(*(rng.randrange(1 << 40) for _ in range(20))))
        assert index.held(0) <= 16_000 and index.held(1) <= 16_000
    index.check_invariants()
    assert index.nodes() <= 110


@pytest.mark.parametrize("replicas", [1, 8, 256])
def test_one_walk_serves_any_number_of_replicas(replicas: int) -> None:
    index = PrefixIndex(replicas, UniformLayout(1), ROOMY)
    keys = chain(*range(50))
    for replica in range(replicas):
        index.insert(replica, keys[: replica % 50 + 1])
    assert index.match(keys) == [replica % 50 + 1 for replica in range(replicas)]
    index.check_invariants()
