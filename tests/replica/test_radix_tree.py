"""The radix tree alone: splits, pins, eviction from leaf to root, hashes, and a naive model of all of it."""

import doctest

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from replica.kv_cache import evictable_leaves, eviction_order, radix_node, sequence_pages, stored_events
from replica.kv_cache import radix_tree as module
from replica.kv_cache.cache import Evicted
from replica.kv_cache.eviction_order import LeastRecent
from replica.kv_cache.radix_node import common_length
from replica.kv_cache.radix_tree import NOWHERE, RadixTree


def tree_of(*texts, namespace="n", **options):
    """Each text stored and let go; the page of a unit is its number in order of storing."""
    tree = RadixTree(LeastRecent(), **options)
    tree.slots = 0
    for text in texts:
        tree.unpin(insert(tree, text, namespace))
    return tree


def insert(tree, text, namespace="n"):
    """Keep ``text``, storing what is not there; its end, pinned once."""
    place = tree.locate(namespace, text, len(text))
    node = tree.keep(namespace, place)
    tree.count_hit(node)
    new = len(text) - len(place)
    if new:
        first = getattr(tree, "slots", 0)
        tree.slots = first + new
        ends = range(len(place) // tree._hash_units, len(text) // tree._hash_units)
        hashes = [bytes(text[: (end + 1) * tree._hash_units]) for end in ends]
        node = tree.grow(node, text[len(place) :], list(range(first, first + new)), hashes)
    return node


def found(tree, text, namespace="n"):
    return len(tree.locate(namespace, text, len(text)))


def edges(tree):
    """(start, units) of every edge, sorted."""
    tree.check_invariants()
    return sorted((node.start, node.units) for node in tree.walk() if node.parent is not None)


@pytest.mark.parametrize(
    "documented", [module, radix_node, eviction_order, evictable_leaves, sequence_pages, stored_events]
)
def test_doctests(documented):
    assert doctest.testmod(documented).failed == 0


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 100])
def test_common_length_at_every_place(length):
    edge = list(range(length))
    for parts_at in range(length + 1):
        units = [None, *edge[:parts_at], *["x"] * (length + 2 - parts_at)]
        assert common_length(edge, units, 1, len(units)) == parts_at
        for stop in range(1, len(units)):
            assert common_length(edge, units, 1, stop) == min(parts_at, stop - 1)


def test_r_insert_and_match_whole_and_in_part():
    tree = tree_of([1, 2, 3])
    assert found(tree, [1, 2, 3]) == 3 and found(tree, [1, 2, 3, 4]) == 3
    assert found(tree, [1, 2]) == 2 and found(tree, [2]) == 0 and found(tree, []) == 0
    assert tree.cached == tree.evictable == 3


def test_r_advanced_splits():
    tree = tree_of(list(range(1, 9)))
    assert edges(tree) == [(0, [1, 2, 3, 4, 5, 6, 7, 8])]
    tree.unpin(insert(tree, [1, 2, 9, 10]))
    assert edges(tree) == [(0, [1, 2]), (2, [3, 4, 5, 6, 7, 8]), (2, [9, 10])]
    assert tree.cached == 10
    tree.unpin(tree.keep("n", tree.locate("n", [1, 2, 3, 4, 7], 5)))  # a lookup that is used splits too
    assert edges(tree) == [(0, [1, 2]), (2, [3, 4]), (2, [9, 10]), (4, [5, 6, 7, 8])]
    tree.unpin(tree.keep("n", tree.locate("n", [1], 1)))
    assert edges(tree) == [(0, [1]), (1, [2]), (2, [3, 4]), (2, [9, 10]), (4, [5, 6, 7, 8])]
    assert tree.cached == 10
    for text, slots in (([1, 2, 3, 4, 5, 6, 7, 8], range(8)), ([1, 2, 9, 10], [0, 1, 8, 9])):
        node = tree.keep("n", tree.locate("n", text, len(text)))
        assert tree.slots_to(node) == list(slots)
        tree.unpin(node)


def test_invariant_c_a_lookup_never_changes_values_or_totals():
    tree = tree_of(list(range(1, 9)), [1, 2, 9, 10])
    before = edges(tree), tree.cached, tree.evictable, tree.nodes
    for text in ([1, 2, 3], [1, 2, 9, 9], [5], []):
        found(tree, text)
    assert (edges(tree), tree.cached, tree.evictable, tree.nodes) == before


def test_a_place_cut_short_is_the_place_of_the_shorter_text():
    tree = tree_of(list(range(1, 9)), [1, 2, 9, 10], [1, 2, 3, 4, 11])
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    place = tree.locate("n", text, 7)
    for length in range(8):
        assert tree.shorten(place, length) == tree.locate("n", text, length)
    assert tree.shorten(place, 99) == place and tree.shorten(NOWHERE, 0) == NOWHERE


def test_a_split_keeps_pins_uses_hashes_and_the_lower_node():
    tree = tree_of(hash_units=2)
    lower = insert(tree, [1, 2, 3, 4, 5])
    again = insert(tree, [1, 2, 3, 4, 5])
    assert again is lower and (lower.pins, lower.uses) == (2, 2)
    assert lower.hashes == [bytes([1, 2]), bytes([1, 2, 3, 4])]
    upper = tree.keep("n", tree.locate("n", [1, 2, 3], 3))
    assert lower.parent is upper and (upper.units, lower.units) == ([1, 2, 3], [4, 5])
    assert (upper.pins, lower.pins, upper.uses, lower.uses) == (3, 2, 2, 2)
    assert (upper.hashes, lower.hashes) == ([bytes([1, 2])], [bytes([1, 2, 3, 4])])
    for node in (lower, lower, upper):
        tree.unpin(node)
    tree.check_invariants()
    assert tree.evictable == 5


def test_invariant_d_a_pin_moves_the_whole_path_and_nothing_else():
    tree = tree_of([1, 2, 3], [1, 2, 4, 5])
    node = tree.keep("n", tree.locate("n", [1, 2, 3], 3))
    assert tree.evictable == 2
    assert tree.evict(2) == [4, 3]
    with pytest.raises(IndexError, match="1 units wanted, 0 evictable"):
        tree.evict(1)
    tree.unpin(node)
    assert tree.evictable == 3 and found(tree, [1, 2, 3]) == 3
    with pytest.raises(ValueError, match="nobody pins"):
        tree.unpin(node)


def test_invariant_e_eviction_turns_parents_into_leaves_and_frees_each_slot_once():
    tree = tree_of([1, 2, 3, 4], [1, 2, 5], [1, 6, 7], [9])
    slots = []
    order = []
    while tree.evictable:
        slots += tree.evict(1)
        tree.check_invariants()
        order.append([found(tree, text) for text in ([1, 2, 3, 4], [1, 2, 5], [1, 6, 7], [9])])
    assert sorted(slots) == list(range(8))
    assert order == [
        [3, 3, 3, 1],
        [2, 3, 3, 1],
        [2, 2, 3, 1],
        [1, 1, 3, 1],  # the shared 2 is a leaf now, and older than 6 and 7
        [1, 1, 2, 1],
        [1, 1, 1, 1],
        [0, 0, 0, 1],
        [0, 0, 0, 0],
    ]
    assert not tree.roots and tree.nodes == 0


def test_exactly_as_much_is_evicted_as_asked():
    tree = tree_of(list(range(1, 101)))
    assert tree.evict(30) == list(range(99, 69, -1))
    assert found(tree, list(range(1, 101))) == 70 and tree.cached == 70


def test_a_leaf_of_one_holder_grows_in_place_and_others_do_not():
    tree = tree_of(hash_units=100)
    alone = insert(tree, [1, 2])
    assert tree.grow(alone, [3], [50], []) is alone
    second = insert(tree, [1, 2, 3])
    assert second is alone
    longer = tree.grow(second, [4], [51], [])
    assert longer is not alone and alone.units == [1, 2, 3]  # the other's prefix still ends with its node
    other = tree.grow(alone, [5], [52], [])
    assert other is not alone and edges(tree) == [(0, [1, 2, 3]), (3, [4]), (3, [5])]


def test_invariant_i_namespaces_are_disjoint():
    tree = tree_of([1, 2, 3])
    for namespace in (None, "", "m"):
        assert found(tree, [1, 2, 3], namespace) == 0
        tree.unpin(insert(tree, [1, 2, 4], namespace))
    assert tree.cached == 12 and found(tree, [1, 2, 4]) == 2
    tree.check_invariants()


def test_a_namespace_that_nobody_uses_any_more_is_forgotten():
    tree = tree_of()
    for number in range(1_000):
        tree.unpin(insert(tree, [1], namespace=number))
        tree.unpin(insert(tree, [], namespace=-number))
        if tree.cached > 5:
            tree.evict(1)
    assert len(tree.roots) == tree.cached == 5 and tree.nodes == 10


def test_hashes_go_with_the_last_unit_of_their_block_and_name_memory_of_all_of_it():
    evictions = []
    tree = tree_of([1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 9], hash_units=3, evictions=evictions)
    assert dict(tree.hash_counts) == {bytes([1, 2, 3]): 1, bytes([1, 2, 3, 4, 5, 6]): 1}
    assert tree.evict(1) == [6] and not tree.removed  # 7 belongs to no whole block
    assert tree.evict(1) == [5] and tree.removed == [bytes([1, 2, 3, 4, 5, 6])]
    assert evictions == [Evicted(bytes([1, 2, 3, 4, 5, 6]), (3, 4, 5))]
    tree.evict(3)  # 5, 4 and 9
    assert len(evictions) == 1
    tree.evict(1)
    assert evictions[1:] == [Evicted(bytes([1, 2, 3]), (0, 1, 2))] and not tree.hash_counts


def test_a_block_that_begins_above_its_node_is_named_whole():
    evictions = []
    tree = tree_of([1, 2, 3, 4], [1, 2, 3, 5], [1, 7], hash_units=4, evictions=evictions)
    tree.evict(1)
    tree.evict(1)
    assert evictions == [
        Evicted(bytes([1, 2, 3, 4]), (0, 1, 2, 3)),
        Evicted(bytes([1, 2, 3, 5]), (0, 1, 2, 4)),
    ]


def test_clear_zeroes_everything():
    tree = tree_of([1, 2, 3], hash_units=1)
    tree.clear()
    tree.check_invariants()
    assert tree.cached == tree.evictable == tree.nodes == 0 and found(tree, [1]) == 0


def test_the_heap_of_leaves_stays_small():
    tree = tree_of(*([number] for number in range(50)))
    for turn in range(2_000):
        tree.unpin(tree.keep("n", tree.locate("n", [turn % 50], 1)))
    assert len(tree._leaves._heap) <= 64 + 2 * 50 + 1
    tree.check_invariants()


def test_check_invariants_finds_damage():
    def damaged(damage):
        tree = tree_of([1, 2, 3, 4], [1, 2, 5], hash_units=2)
        pinned = insert(tree, [1, 2, 5])
        damage(tree, pinned, pinned.parent)
        with pytest.raises(AssertionError):
            tree.check_invariants()

    damaged(lambda tree, leaf, inner: leaf.slots.pop())
    damaged(lambda tree, leaf, inner: leaf.units.__setitem__(0, 6))
    damaged(lambda tree, leaf, inner: setattr(leaf, "pins", 5))
    damaged(lambda tree, leaf, inner: setattr(leaf, "start", 1))
    damaged(lambda tree, leaf, inner: setattr(leaf, "parent", None))
    damaged(lambda tree, leaf, inner: inner.children.pop(3))
    damaged(lambda tree, leaf, inner: setattr(inner, "last_use", 0))
    damaged(lambda tree, leaf, inner: inner.hashes.clear())
    damaged(lambda tree, leaf, inner: setattr(tree, "evictable", 3))
    damaged(lambda tree, leaf, inner: tree._leaves.discard(inner.children[3]))
    damaged(lambda tree, leaf, inner: setattr(inner.children[3], "last_use", 1))


class TreeLife(RuleBasedStateMachine):
    """Against a naive model: a dict from every cached prefix to its slot and the time it was last used."""

    @initialize(hash_units=st.integers(1, 3))
    def start(self, hash_units):
        self.evictions = []
        self.tree = RadixTree(LeastRecent(), hash_units, self.evictions)
        self.hash_units = hash_units
        self.slot: dict[tuple, int] = {}
        self.used: dict[tuple, int] = {}
        self.holds: list[tuple[tuple, object]] = []
        self.free = list(range(24))
        self.now = 0

    def prefixes(self, key):
        return [key[:length] for length in range(2, len(key) + 1)]  # key[0] is the namespace

    def pinned(self):
        return {prefix for key, _ in self.holds for prefix in self.prefixes(key)}

    def touch(self, key):
        self.now += 1
        for prefix in self.prefixes(key):
            self.used[prefix] = self.now

    keys = st.tuples(st.sampled_from("ab"), st.lists(st.integers(0, 2), max_size=9))

    @rule(key=keys)
    def look(self, key):
        namespace, units = key
        key = (namespace, *units)
        known = [prefix in self.slot for prefix in self.prefixes(key)]
        expected = known.index(False) if False in known else len(known)
        assert len(self.tree.locate(namespace, units, len(units))) == expected

    @rule(key=keys)
    def hold(self, key):
        namespace, units = key
        place = self.tree.locate(namespace, units, len(units))
        node = self.tree.keep(namespace, place)
        self.touch((namespace, *units[: len(place)]))
        self.holds.append(((namespace, *units[: len(place)]), node))

    @precondition(lambda self: self.holds)
    @rule(data=st.data())
    def let_go(self, data):
        key, node = self.holds.pop(data.draw(st.integers(0, len(self.holds) - 1)))
        self.tree.unpin(node)
        self.touch(key)

    @precondition(lambda self: self.holds)
    @rule(data=st.data(), more=st.lists(st.integers(0, 2), min_size=1, max_size=5))
    def publish(self, data, more):
        at = data.draw(st.integers(0, len(self.holds) - 1))
        key, node = self.holds[at]
        more = more[: len(self.free)]
        while more and (key[0], *key[1:], more[0]) in self.slot:  # another has published it
            child = node.children[more[0]]
            same = common_length(child.units, more, 0, len(more))
            if same < len(child.units):
                child = self.tree.split(child, same)
            self.tree.keep_child(child)
            node, key, more = child, (*key, *more[:same]), more[same:]
        if more:
            slots = [self.free.pop() for _ in more]
            ends = range((len(key) - 1) // self.hash_units, (len(key) - 1 + len(more)) // self.hash_units)
            hashes = [repr((*key, *more)[: 1 + (end + 1) * self.hash_units]).encode() for end in ends]
            before = self.used.get(key, 0)
            node = self.tree.grow(node, more, slots, hashes)
            for length, slot in enumerate(slots, 1):
                self.slot[(*key, *more[:length])] = slot
                self.used[(*key, *more[:length])] = before
            key = (*key, *more)
        self.holds[at] = (key, node)

    @rule(count=st.integers(1, 6))
    def evict(self, count):
        pinned = self.pinned()
        evictable = [prefix for prefix in self.slot if prefix not in pinned]
        assert self.tree.evictable == len(evictable)
        if count > len(evictable):
            with pytest.raises(IndexError):
                self.tree.evict(count)
            return
        expected, gone = [], []
        for _ in range(count):
            inner = {prefix[:-1] for prefix in self.slot}
            first = min(
                (prefix for prefix in self.slot if prefix not in pinned and prefix not in inner),
                key=lambda prefix: self.used[prefix],
            )
            if (len(first) - 1) % self.hash_units == 0:
                block = [self.slot[first[:length]] for length in range(2, len(first) + 1)]
                gone.append(Evicted(repr(first).encode(), tuple(block[-self.hash_units :])))
            expected.append(self.slot.pop(first))
            del self.used[first]
        assert self.tree.evict(count) == expected
        assert self.evictions == gone and self.tree.removed == [evicted.block_hash for evicted in gone]
        self.evictions.clear()
        self.tree.removed.clear()
        self.free += expected

    @invariant()
    def sound(self):
        self.tree.check_invariants()
        assert self.tree.cached == len(self.slot)
        there = {}
        for node in self.tree.walk():
            slots = self.tree.slots_to(node)
            root = node
            units: list[object] = []
            for way in self.tree.path(node):
                units = [*way.units, *units]
                root = way.parent
            for length, slot in enumerate(slots, 1):
                there[(root.namespace, *units[:length])] = slot
        assert there == self.slot
        hashes = {repr(prefix).encode() for prefix in self.slot if (len(prefix) - 1) % self.hash_units == 0}
        assert set(self.tree.hash_counts) == hashes
        for key, node in self.holds:
            assert self.tree.slots_to(node) == [self.slot[prefix] for prefix in self.prefixes(key)]


TestTreeLife = TreeLife.TestCase
TestTreeLife.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_nowhere_is_the_empty_prefix():
    tree = tree_of()
    node = tree.keep("n", NOWHERE)
    assert tree.slots_to(node) == [] and tree.nodes == 1
    tree.unpin(node)
    assert tree.nodes == 0
