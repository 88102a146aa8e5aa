"""The prefix index against a naive model: same matches, bounded, tails before heads."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import TEXT_LAYOUT, UniformLayout
from router.routing.tenant import Tenant

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


def test_K05_tails_leave_before_heads_and_oldest_first() -> None:
    index = PrefixIndex(1, UniformLayout(1), 6)
    old, new = chain(1, 2, 3, 4), chain(1, 2, 8, 9)
    index.insert(0, old)
    index.insert(0, new)  # 1 2 shared; 3 4 8 9: six blocks
    index.insert(0, chain(1, 2, 8, 9, 10))
    assert index.match(old) == [3], "the old tail's last block made room"
    assert index.match(chain(1, 2, 8, 9, 10)) == [5]


def test_K06_a_use_refreshes() -> None:
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


PIECE = st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.lists(st.integers(0, 2), max_size=8))


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECE, max_size=60), share=st.sampled_from([0.2, 0.5, 1.0]))
def test_a_namespace_fills_no_more_than_its_share(
    pieces: list[tuple[str, int, list[int]]], share: float
) -> None:
    """And what is over is its own, the least recently used; the others keep theirs while there is room."""
    index = PrefixIndex(2, UniformLayout(1), 10)
    tenants = {name: Tenant(name, index_share=share if name == "a" else 1.0) for name in "abc"}
    for name, replica, parts in pieces:
        before = {other: index.held_of(replica, other) for other in "bc" if other != name}
        full = index.held(replica) + len(parts) + 1 > 10
        keys = chain(ord(name), *parts)
        index.insert(replica, keys, tenants[name])
        index.check_invariants()
        assert index.held_of(replica, "a") <= int(share * 10)
        assert sum(index.held_of(replica, one) for one in "abc") == index.held(replica)
        if not full:
            assert all(index.held_of(replica, other) == units for other, units in before.items())
        if name != "a":
            assert index.match(keys)[replica] == len(keys)
    for replica in (0, 1):
        told = list(index.chains(replica))
        assert {namespace for namespace, _ in told} == {one for one in "abc" if index.held_of(replica, one)}
        assert all(keys[0] == chain(ord(namespace))[0] for namespace, keys in told)
        index.clear(replica)
        assert [index.held_of(replica, one) for one in "abc"] == [0, 0, 0]
    index.check_invariants()


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECE, max_size=60), cut=st.integers(0, 9))
def test_without_shares_namespaces_change_nothing(pieces: list[tuple[str, int, list[int]]], cut: int) -> None:
    """What is oldest of all is forgotten first, whosever it is."""
    parted, plain = PrefixIndex(2, UniformLayout(1), 10), PrefixIndex(2, UniformLayout(1), 10)
    prompts = [(replica, chain(ord(name), *parts), Tenant(name)) for name, replica, parts in pieces]
    for number, (replica, keys, tenant) in enumerate(prompts):
        parted.insert(replica, keys, tenant)
        plain.insert(replica, keys)
        if number % 10 == cut:
            for index in (parted, plain):
                index.truncate(replica, keys, len(keys) // 2)
        parted.check_invariants()
        assert [parted.match(keys) for _, keys, _ in prompts] == [plain.match(keys) for _, keys, _ in prompts]


def test_a_flood_of_one_tenants_prompts_leaves_another_its_own() -> None:
    index = PrefixIndex(1, UniformLayout(1), 1_000)
    flood, small = Tenant("flood", index_share=0.5), Tenant("small", index_share=0.5)
    index.insert(0, chain(7, *range(100)), small)
    rng = random.Random(1)
    for _ in range(2_000):
        index.insert(0, chain(8, *(rng.getrandbits(40) for _ in range(9))), flood)
    assert (index.held_of(0, "flood"), index.held_of(0, "small")) == (500, 101)
    assert index.nodes() < 60
