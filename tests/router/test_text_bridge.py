"""The text bridge against an engine with real eviction: belief follows what the engine still holds."""

import random
from statistics import fmean

import pytest

from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import TEXT_LAYOUT, BlockLayout, UniformLayout
from router.routing.text_bridge import TextBridge


class Engine:
    """A prefix cache of whole conversations' blocks: least recently used, tails before heads."""

    def __init__(self, capacity_blocks: int, bridge: TextBridge | None) -> None:
        self.capacity = capacity_blocks
        self.bridge = bridge
        self.used: dict[tuple[int, int], int] = {}  # (conversation, block) -> tick
        self.tick = 0

    def cached(self, conversation: int, blocks: int) -> int:
        depth = 0
        while depth < blocks and (conversation, depth) in self.used:
            depth += 1
        return depth

    def serve(self, conversation: int, blocks: int) -> None:
        self.tick += 1
        new = sum((conversation, depth) not in self.used for depth in range(blocks))
        excess = len(self.used) + new - self.capacity
        mine = {(conversation, depth) for depth in range(blocks)}
        for key in sorted(self.used.keys() - mine, key=lambda k: (self.used[k], -k[1]))[: max(0, excess)]:
            if self.bridge:
                self.bridge.removed(0, 1, len(self.used))
            del self.used[key]
        for depth in range(blocks):
            self.used[conversation, depth] = self.tick


def belief_errors(*, bridged: bool, mine: float, reply_blocks: int, seed: int = 1) -> list[float]:
    """Conversations of growing prompts through a router that sees a share ``mine`` of the traffic; by request
    of the second half: share of the prompt wrongly believed cached (positive) or missing (negative)."""
    rng = random.Random(seed)
    capacity_blocks = 2_000
    # The usual bound on prompts alone: the replica's capacity.
    index = PrefixIndex(1, UniformLayout(1), capacity_blocks)
    bridge = TextBridge(index, 1) if bridged else None
    engine = Engine(capacity_blocks, bridge)
    lengths: dict[int, int] = {}
    errors = []
    for step in range(1_500):
        conversation = rng.randrange(60)
        known = lengths.get(conversation, 0)
        prompt = known + rng.randint(5, 20)
        lengths[conversation] = prompt + reply_blocks if prompt < 150 else 0
        ours = conversation < 60 * mine
        if ours:
            keys = [conversation * 10_000 + depth + 1 for depth in range(prompt)]
            believed = index.match(keys)[0]
            if step > 750:
                errors.append((believed - engine.cached(conversation, prompt)) / prompt)
            index.insert(0, keys)
        engine.serve(conversation, prompt + reply_blocks)
    return errors


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(
    ("mine", "reply_blocks", "without_bridge", "with_bridge"),
    [(1.0, 0, 0.0, 0.05), (1.0, 10, 0.04, 0.06), (0.5, 0, 0.2, 0.06), (0.25, 10, 0.5, 0.12)],
    ids=["prompts alone", "long replies", "two routers", "four routers and replies"],
)
def test_belief_follows_the_engine(
    mine: float, reply_blocks: int, without_bridge: float, with_bridge: float, seed: int
) -> None:
    """Mean share of a prompt that is wrongly believed: at least so much without, at most so much with."""
    errors = {
        bridged: fmean(
            map(abs, belief_errors(bridged=bridged, mine=mine, reply_blocks=reply_blocks, seed=seed))
        )
        for bridged in (False, True)
    }
    assert errors[False] >= without_bridge and errors[True] <= with_bridge, errors


def test_a_clear_forgets_everything_of_one_replica() -> None:
    index = PrefixIndex(2, UniformLayout(1), 100)
    bridge = TextBridge(index, 2)
    for replica in (0, 1):
        index.insert(replica, [1, 2, 3])
    bridge.cleared(0)
    assert index.match([1, 2, 3]) == [0, 3]


@pytest.mark.parametrize(
    ("layout", "blocks"), [(UniformLayout(1), 50_000), (TEXT_LAYOUT, 32), (TEXT_LAYOUT, 200)]
)
@pytest.mark.parametrize("pieces", [1, 10, 1_000])
def test_many_small_removals_forget_as_much_as_one_large_one(
    layout: BlockLayout, blocks: int, pieces: int
) -> None:
    """Text blocks are coarse, a removed block is small: what is forgotten agrees to within one text block."""
    index = PrefixIndex(1, layout, 1 << 40)
    index.insert(0, range(1, blocks + 1))
    bridge, before = TextBridge(index, 1), index.held(0)
    for _ in range(pieces):
        bridge.removed(0, 1_000 // pieces, 10_000)
    last_block = layout.end(blocks) - layout.end(blocks - 1)
    # All at once the share is of 10,000 + 1,000 blocks, bit by bit a little more.
    assert before * 0.90 - last_block <= index.held(0) <= before * 0.91 + last_block
    assert index.capacity(0) == 1 << 40, "the bound itself stays"


def test_nothing_believed_nothing_forgotten() -> None:
    index = PrefixIndex(1, UniformLayout(1), 10)
    bridge = TextBridge(index, 1)
    bridge.removed(0, 5, 5)
    bridge.removed(0, 0, 0)
    index.insert(0, [1, 2])
    assert index.match([1, 2]) == [2]
