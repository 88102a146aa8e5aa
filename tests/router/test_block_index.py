"""The block index against a naive model: copies, tiers, expectations, bounds; and against a real vLLM."""

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from router.routing.block_index import MAX_TIERS, BlockIndex, block_name
from router.routing.block_naming import BlockNaming
from tests.router.vllm_wire import BLOCK_TOKENS, CAPACITY_BLOCKS, wire_batches, wire_requests

REPLICAS = 3
MEDIA = ("GPU", "CPU", "DISK")

prompts = st.lists(st.integers(0, 2), min_size=1, max_size=8).map(
    lambda names: [hash(tuple(names[: depth + 1])) & 0xFFFF_FFFF_FFFF_FFFF for depth in range(len(names))]
)
replicas = st.integers(0, REPLICAS - 1)
media = st.sampled_from(MEDIA)


class AgainstCounters(RuleBasedStateMachine):
    """The index is a counter of copies per replica, medium and name; ``match`` walks it."""

    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(REPLICAS)
        self.copies: Counter[tuple[int, str, int]] = Counter()
        self.expected: Counter[tuple[int, int]] = Counter()
        self.unknown = 0

    def holds(self, replica: int, name: int) -> bool:
        return any(self.copies[replica, medium, name] for medium in MEDIA)

    @rule(replica=replicas, prompt=prompts, start=st.integers(0, 7), medium=media)
    def stored(self, replica: int, prompt: list[int], start: int, medium: str) -> None:
        start = min(start, len(prompt) - 1)
        parent = prompt[start - 1] if start else None
        orphans = self.index.unknown_parents[replica]
        news = self.index.stored(replica, prompt[start:], parent, medium)
        assert self.index.unknown_parents[replica] - orphans == (
            parent is not None and not self.holds(replica, parent)
        )
        assert news == sum(not self.copies[replica, medium, name] for name in prompt[start:])
        self.copies.update((replica, medium, name) for name in prompt[start:])

    @rule(replica=replicas, prompt=prompts, start=st.integers(0, 7), medium=media)
    def removed(self, replica: int, prompt: list[int], start: int, medium: str) -> None:
        gone = 0
        for name in prompt[start:]:
            copies = self.copies[replica, medium, name]
            self.unknown += not copies
            gone += copies == 1
            if copies:
                self.copies[replica, medium, name] -= 1
        assert self.index.removed(replica, prompt[start:], medium) == gone

    @rule(replica=replicas)
    def cleared(self, replica: int) -> None:
        self.index.cleared(replica)
        for key in [key for key in self.copies if key[0] == replica]:
            del self.copies[key]

    @rule(replica=replicas, prompt=prompts)
    def expect(self, replica: int, prompt: list[int]) -> None:
        self.index.expect(replica, prompt)
        self.expected.update((replica, name) for name in prompt)

    @rule(replica=replicas, prompt=prompts)
    def settle(self, replica: int, prompt: list[int]) -> None:
        if all(self.expected[replica, name] for name in prompt):
            self.index.settle(replica, prompt)
            self.expected.subtract((replica, name) for name in prompt)

    @rule(prompt=prompts, asked=st.sets(media))
    def match(self, prompt: list[int], asked: set[str]) -> None:
        found = []
        for replica in range(REPLICAS):
            depth = 0
            while depth < len(prompt) and (
                self.expected[replica, prompt[depth]]
                or any(self.copies[replica, medium, prompt[depth]] for medium in asked)
            ):
                depth += 1
            found.append(depth)
        assert self.index.match(prompt, asked) == found

    @rule(prompt=prompts)
    def levels(self, prompt: list[int]) -> None:
        levels = self.index.levels(prompt)
        by_replica = [0] * REPLICAS
        for mask, blocks in levels:
            for replica in range(REPLICAS):
                if mask >> replica & 1:
                    assert not by_replica[replica], "in one level only"
                    by_replica[replica] = blocks
        assert by_replica == self.index.match(prompt)
        assert [blocks for _, blocks in levels] == sorted({b for b in by_replica if b})

    @invariant()
    def whole(self) -> None:
        self.index.check_invariants()
        assert sum(self.index.unknown_removals) == self.unknown
        assert self.index.expected() == sum(count > 0 for count in self.expected.values())
        for replica in range(REPLICAS):
            for medium in MEDIA:
                held = {n for (r, m, n), c in self.copies.items() if (r, m) == (replica, medium) and c}
                assert self.index.names(replica, medium) == held
                assert self.index.held(replica, medium) == len(held)


TestAgainstCounters = AgainstCounters.TestCase
TestAgainstCounters.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


def test_a_lost_head_leaves_no_credit_until_it_is_back() -> None:
    """Black-box case 5: what is matched is always a true prefix."""
    index = BlockIndex(1)
    index.stored(0, [1, 2, 3], None)
    index.removed(0, [1])
    assert index.match([1, 2, 3]) == [0]
    index.stored(0, [1], None)
    assert index.match([1, 2, 3]) == [3]


def test_K13_clearing_one_replica_leaves_the_others() -> None:
    """Black-box case 13."""
    index = BlockIndex(3)
    for replica in range(3):
        index.stored(replica, [1, 2], None)
        index.stored(replica, [2], 1, "CPU")
    index.cleared(1)
    assert index.match([1, 2]) == [2, 0, 2] and index.held(1, "CPU") == 0 and index.held(2, "CPU") == 1


def test_K12_strange_events_do_no_harm() -> None:
    """Black-box case 12: unknown parent, removal of the unknown, the same event twice."""
    index = BlockIndex(2)
    assert index.removed(0, [5]) == 0 and index.unknown_removals == [1, 0]
    index.stored(1, [8], parent=7)
    assert index.unknown_parents == [0, 1] and index.match([7, 8]) == [0, 0]
    index.check_invariants()


def test_hashes_of_every_form_are_one_name() -> None:
    digest = bytes(24) + (0xFEDC_BA98_7654_3210).to_bytes(8, "big")
    forms = [digest, 0xFEDC_BA98_7654_3210, 0xFEDC_BA98_7654_3210 - (1 << 64)]
    assert {block_name(form) for form in forms} == {0xFEDC_BA98_7654_3210}
    index = BlockIndex(1)
    for form in forms:
        index.stored(0, [form], None)
    assert index.held(0) == 1 and index.copies(0, 0xFEDC_BA98_7654_3210) == 3


@pytest.mark.parametrize("limit", [1, 2, 10])
def test_a_replica_that_tells_of_too_much_is_forgotten_and_learned_anew(limit: int) -> None:
    index = BlockIndex(2, max_blocks=limit)
    index.stored(1, [1], None)
    index.stored(0, range(1, limit + 1), None)
    assert index.held(0) == limit and index.overflows == [0, 0]
    index.stored(0, [limit + 1], limit)
    assert index.held(0) == 0 and index.overflows == [1, 0]
    assert index.held(1) == 1, "the others are not touched"
    index.stored(0, [1], None)
    assert index.match([1]) == [1, 1]
    index.check_invariants()


def test_tiers_without_end_share_one() -> None:
    index = BlockIndex(1)
    for number in range(3 * MAX_TIERS):
        index.stored(0, [number], None, f"disk-{number}")
    assert len(index.media()) <= MAX_TIERS + 1
    index.check_invariants()


def test_expected_blocks_are_a_prefix_together_with_what_is_held() -> None:
    index = BlockIndex(2)
    index.stored(0, [1, 2], None)
    index.expect(0, [3, 4])
    index.expect(0, [3])
    assert index.match([1, 2, 3, 4, 5]) == [4, 0]
    index.settle(0, [3, 4])
    assert index.match([1, 2, 3, 4, 5]) == [3, 0]
    index.cleared(0)
    assert index.match([3]) == [1, 0], "it is still on its way"
    index.settle(0, [3])
    assert index.expected() == 0 and index.match([3]) == [0, 0]


def test_the_index_agrees_with_every_answer_of_a_recorded_vllm() -> None:
    """What the index would have said before each request is what vLLM then reported as cached."""
    index, naming = BlockIndex(1), BlockNaming("sha256", BLOCK_TOKENS)
    batches = iter(wire_batches())
    for request in wire_requests():
        names = naming.keys(request.prompt_token_ids, request.cache_salt)
        # The last token is always computed, so a prompt is never cached whole.
        matched = min(index.match(names)[0], (request.prompt_tokens - 1) // BLOCK_TOKENS)
        assert matched * BLOCK_TOKENS == request.cached_tokens
        if matched < len(names):  # it stores something: one batch
            for event in next(batches).decoded.events:
                if isinstance(event, BlocksStored):
                    index.stored(0, event.block_hashes, event.parent_hash, event.medium)
                else:
                    assert isinstance(event, BlocksRemoved)
                    index.removed(0, event.block_hashes, event.medium)
            index.check_invariants()
            assert index.match(names) == [len(names)] and index.held(0) <= CAPACITY_BLOCKS
    assert next(batches, None) is None
    assert index.unknown_parents == index.unknown_removals == [0]
