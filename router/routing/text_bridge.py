"""What KV events can teach the text index: how much a replica forgot, and that it forgot everything.

In text mode the router knows prompts as text and events name blocks of tokens; nothing maps one to the
other without the model's tokenizer. But both orders of eviction are least recently used, tails before heads,
so *how much* was forgotten tells *what* was. When a replica removes a share of the blocks it holds, the text
index forgets the same share of what it believes of that replica, oldest tails first. It settles where it
should: an engine holds replies and other routers' prompts, too, and turns over faster than this router's
prompts alone would fill it; the text index then keeps what fits the engine's memory in *time*.

Worked example: a full replica holds 1,000 blocks, the text index believes in 400 KB of prompts. A new prompt
of 40 KB and its reply take 125 blocks; to make room 125 others go, 125 / 1,125 of what there is with the new
ones: of 440 KB of text the oldest 49 KB are forgotten. While prompts and replies go on like this, 320 KB stay
believed: eight of the last requests, as many as the engine holds, and not the ten that 400 KB stand for.

Limits: it says nothing of which text a removed block held, so a prompt that another router keeps warm is
forgotten here in its turn (and credited again when it is next sent); shares are of distinct blocks on the
device, other tiers are not looked at. A clear or a restart forgets all, at once. Exact mode does not need
this: there the block index is the truth (``exact_index``).
"""

from router.routing.prefix_index import PrefixIndex

LEAST_SHARE = 1 / 512
"""Forgetting takes whole text blocks; shares are saved up until they are worth it."""


class TextBridge:
    """Turns blocks removed into text forgotten.

    >>> from router.routing.prompt_blocks import UniformLayout
    >>> index = PrefixIndex(replicas=1, layout=UniformLayout(1), capacity=1_000)
    >>> index.insert(0, range(1, 101))                       # 100 units believed
    >>> bridge = TextBridge(index, replicas=1)
    >>> bridge.removed(0, blocks=50, held_before=150)        # 50 of 150 make room for as many new ones
    >>> index.held(0), index.match(range(1, 101))
    (75, [75])
    """

    __slots__ = ("_full", "_index", "_owed")

    def __init__(self, index: PrefixIndex, replicas: int) -> None:
        self._index = index
        self._full = [0] * replicas  # most blocks it ever held
        self._owed = [0.0] * replicas  # units to be forgotten; negative: forgotten in advance

    def add_replica(self) -> None:
        """Make room for one more replica."""
        self._full.append(0)
        self._owed.append(0.0)

    def removed(self, replica: int, blocks: int, held_before: int) -> None:
        """``blocks`` of the ``held_before`` that the replica held on its device are gone."""
        if blocks <= 0:
            return
        index = self._index
        full = self._full[replica] = max(self._full[replica], held_before)
        held, owed = index.held(replica), self._owed[replica]
        owed += blocks / (full + blocks) * max(0.0, held - owed)
        if owed >= max(1.0, held * LEAST_SHARE):
            capacity = index.capacity(replica)
            index.set_capacity(replica, held - int(owed))
            index.set_capacity(replica, capacity)
            owed -= held - index.held(replica)  # whole blocks went: what was too much is paid in advance
        self._owed[replica] = owed

    def cleared(self, replica: int) -> None:
        """The replica lost its whole cache."""
        self._index.clear(replica)
        self._full[replica] = 0
        self._owed[replica] = 0.0
