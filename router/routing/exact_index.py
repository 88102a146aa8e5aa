"""What each replica holds of prompts known token by token, in that replica's own names for blocks.

Two beliefs stand side by side. **Told**: the block index, fed by the replica's KV events; while they come and
can be trusted (``block_source``) they are the truth. **Guessed**: a prefix index of what was sent there,
bounded by the replica's capacity; used where no events come, and for what lost ones do not tell
(``event_doubt``). Both are always kept up to date, so a replica can change sides at any time.

The same object serves text mode, for its counts of blocks held and removed (``names_matter=False``: hashes
are kept as they come).
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from replica.contract.kv_events import DEVICE_MEDIUM, BlocksRemoved, BlocksStored
from router.routing.block_index import MAX_BLOCKS, BlockIndex
from router.routing.block_naming import BlockNaming
from router.routing.block_source import BlockSettings, BlockSource
from router.routing.engine_names import EngineNames
from router.routing.event_doubt import EventDoubt
from router.routing.prefix_index import PrefixIndex
from router.routing.prompt_blocks import UniformLayout
from router.routing.replica_bits import bits
from router.routing.tenant import Tenant

EXPECTED_BLOCKS = 2_048
"""Of a longer prompt so many new blocks are expected; the rest counts when it is announced."""
NOTICES_KEPT = 100
_DEVICE = (None, DEVICE_MEDIUM)

Chains = Mapping[BlockNaming, Sequence[int]]
"""A prompt's block keys, by naming."""


class Expectation:
    """What one request will have stored on its replica. Made by ``sent``, ended by ``over``."""

    __slots__ = ("blocks_before", "keys", "replica", "told")

    def __init__(self, replica: int, keys: Sequence[int], blocks_before: int, told: Sequence[int]) -> None:
        self.replica = replica
        self.keys = keys
        self.blocks_before = blocks_before
        """Leading blocks it was believed to hold already."""
        self.told = told
        """The others, as the block index was told to expect them."""


@dataclass(frozen=True, slots=True)
class BlockState:
    """One replica's side of the exact index, for ``/fleet`` and ``/metrics``."""

    naming: str
    """Scheme and block size: ``"sha256/32"``."""
    telling: bool
    doubted: bool
    """Events were lost: what they do not tell is guessed."""
    translated: bool
    """Its hashes are translated through tokens."""
    events: int
    held_blocks: int
    """Distinct blocks on the device, as told."""
    announced: int
    unannounced: int
    unknown_parents: int
    unknown_removals: int
    unnamed: int
    overflows: int
    unkept: int
    other_groups: int


class ExactIndex:
    """Tokens held by replica for prompts given as chains of keys.

    >>> index = ExactIndex([BlockSettings("warmroute", 2), BlockSettings("warmroute", 2)], 1_000)
    >>> (naming,) = index.namings
    >>> chains = {naming: naming.keys([1, 2, 3, 4, 5])}
    >>> sent = index.sent(0, chains, matched_tokens=0)              # a guess, from the moment it is sent
    >>> index.levels(chains, prompt_tokens=5)                       # replica 0 (bit 0): 4 tokens
    [(1, 4)]
    >>> index.stored(1, BlocksStored(tuple(chains[naming][:1]), None, (1, 2), block_size=2))
    1
    >>> index.levels(chains, prompt_tokens=5)
    [(2, 2), (1, 4)]
    """

    def __init__(
        self,
        settings: Sequence[BlockSettings],
        capacity_tokens: int,
        *,
        names_matter: bool = True,
        max_blocks: int = MAX_BLOCKS,
    ) -> None:
        """``capacity_tokens``: what a replica is taken to hold until it says."""
        self._sources: dict[int, BlockSource] = {}
        self._names_matter = names_matter
        self._told = BlockIndex(0, max_blocks)
        self._guessed = PrefixIndex(0, UniformLayout(1), 1)
        self._capacity_tokens: dict[int, int] = {}
        self._masks: dict[BlockNaming, tuple[int, int]] = {}
        self._doubted = 0
        """Replicas that tell, but not all, as bits."""
        self.notices: deque[tuple[int, str]] = deque(maxlen=NOTICES_KEPT)
        """(replica, what the operator should know); whoever logs them takes them out."""
        for replica, one in enumerate(settings):
            self.add_slot()
            self.replica_added(replica, one, capacity_tokens)

    # --- who there is ---------------------------------------------------------------------------

    def add_slot(self) -> None:
        """Make room for an index more than there ever were."""
        self._told.add_replica()
        self._guessed.add_replica(1)

    def replica_added(self, replica: int, settings: BlockSettings, capacity_tokens: int) -> None:
        """A replica joined; nothing is known of its cache."""
        self._sources[replica] = BlockSource(settings)
        self._capacity_tokens[replica] = capacity_tokens
        self._bound(replica)
        self._sort()

    def replica_gone(self, replica: int) -> None:
        """Forget the replica: nobody needs its namings, nobody matches it. O(what it held)."""
        del self._sources[replica], self._capacity_tokens[replica]
        self._told.replica_gone(replica)
        self._guessed.clear(replica)
        self._sort()

    # --- questions ------------------------------------------------------------------------------

    @property
    def namings(self) -> tuple[BlockNaming, ...]:
        """Every naming in the fleet: a prompt needs a chain for each."""
        return tuple(self._masks)

    @property
    def told(self) -> BlockIndex:
        """What events told, to be read."""
        return self._told

    def levels(self, chains: Chains, prompt_tokens: int) -> list[tuple[int, int]]:
        """Who holds how many of the prompt's tokens: (replicas as bits, tokens), the deepest last.

        The last token is always computed, so of a prompt of whole blocks the last one is not counted.
        """
        levels: list[tuple[int, int]] = []
        for naming, (telling, guessing) in self._masks.items():
            keys = chains.get(naming)
            most = (prompt_tokens - 1) // naming.block_tokens
            if not keys or not most:
                continue
            doubted = telling & self._doubted
            for index, wanted in ((self._told, telling ^ doubted), (self._guessed, guessing)):
                if wanted:
                    for mask, blocks in index.levels(keys):
                        if mask & wanted:
                            levels.append((mask & wanted, min(blocks, most) * naming.block_tokens))
            if doubted:
                for mask, blocks in self._doubted_levels(keys, doubted):
                    levels.append((mask, min(blocks, most) * naming.block_tokens))
        levels.sort(key=_tokens)
        return levels

    def _doubted_levels(self, keys: Sequence[int], doubted: int) -> list[tuple[int, int]]:
        """What is told of the ``doubted`` replicas, and beyond it what is guessed of them."""
        told: dict[int, int] = {}
        for mask, blocks in self._told.levels(keys):
            for replica in bits(mask & doubted):
                told[replica] = blocks
        held = dict(told)
        for mask, blocks in self._guessed.levels(keys):
            for replica in bits(mask & doubted):
                doubt = self._sources[replica].doubt
                if doubt is not None:
                    held[replica] = doubt.guessed(keys, told.get(replica, 0), blocks)
        by_depth: dict[int, int] = {}
        for replica, blocks in held.items():
            if blocks:
                by_depth[blocks] = by_depth.get(blocks, 0) | 1 << replica
        return [(mask, blocks) for blocks, mask in by_depth.items()]

    def telling(self, replica: int) -> bool:
        """The replica's events come and are trusted."""
        return self._sources[replica].telling

    def naming(self, replica: int) -> BlockNaming:
        """How the replica names its blocks, as far as is known."""
        return self._sources[replica].naming

    def guesses(self, replica: int) -> Iterator[tuple[str, Sequence[int]]]:
        """Chains of what is guessed of the replica's cache; see ``PrefixIndex.chains``."""
        return self._guessed.chains(replica)

    def state(self, replica: int) -> BlockState:
        """For reports."""
        source, told = self._sources[replica], self._told
        return BlockState(
            naming=source.naming.described(),
            telling=source.telling,
            doubted=source.doubt is not None,
            translated=source.names is not None and source.events > 0,
            events=source.events,
            held_blocks=told.held(replica),
            announced=source.announced,
            unannounced=source.unannounced + len(source.pending),
            unknown_parents=told.unknown_parents[replica],
            unknown_removals=told.unknown_removals[replica],
            unnamed=0 if source.names is None else source.names.unnamed,
            overflows=told.overflows[replica],
            unkept=told.unkept[replica],
            other_groups=source.other_groups,
        )

    # --- a request's life -----------------------------------------------------------------------

    def sent(
        self, replica: int, chains: Chains, matched_tokens: int, tenant: Tenant | None = None
    ) -> Expectation | None:
        """A request goes to ``replica``, which is believed to hold ``matched_tokens``: expect the rest."""
        source = self._sources[replica]
        keys = chains.get(source.naming)
        if not keys:
            return None
        self._guessed.insert(replica, keys, tenant)
        before = matched_tokens // source.naming.block_tokens
        told = keys[before : before + EXPECTED_BLOCKS] if source.events else ()
        if told:
            self._told.expect(replica, told)
        return Expectation(replica, keys, before, told)

    def guess(self, replica: int, chains: Chains, tenant: Tenant | None = None) -> None:
        """The replica has shown that it holds the whole prompt."""
        keys = chains.get(self._sources[replica].naming)
        if keys:
            self._guessed.insert(replica, keys, tenant)

    def over(self, expectation: Expectation, *, computed: bool) -> None:
        """The request is over; ``computed``: its prompt was, so its blocks should have been announced."""
        replica, told = expectation.replica, expectation.told
        if told:
            self._told.settle(replica, told)
        if not computed:
            self._guessed.truncate(replica, expectation.keys, expectation.blocks_before)
        elif told and self._sources[replica].answered(
            told[0], lambda name: self._told.holds(replica, name), self._noticed(replica)
        ):
            self._sort()

    # --- what replicas tell ---------------------------------------------------------------------

    def stored(self, replica: int, event: BlocksStored) -> int:
        """The replica announced blocks; how many of them are new on that tier."""
        source = self._sources[replica]
        if event.group:
            source.other_groups += 1
            return 0
        self._heard(source)
        if not self._names_matter:
            return self._told.stored(replica, event.block_hashes, event.parent_hash, event.medium)
        if source.check(event, self._noticed(replica)):
            self._renamed(replica)
        if not self._told.keeps(replica, len(event.block_hashes), event.medium):
            self._told.unkept[replica] += len(event.block_hashes)
            return 0  # and not named either: names cost more than the blocks
        overflows = self._told.overflows[replica]
        hashes, parent = source.stored(event)
        doubt = source.doubt
        if doubt is not None and event.medium in _DEVICE:
            hashes = list(hashes)
            doubt.stored(hashes)
        new = self._told.stored(replica, hashes, parent, event.medium, copies=doubt is None)
        if self._told.overflows[replica] != overflows:
            source.forget()
            self._sort()
        return new

    def removed(self, replica: int, event: BlocksRemoved) -> int:
        """The replica announced what it removed; how many blocks are gone from that tier."""
        source = self._sources[replica]
        if event.group:
            source.other_groups += 1
            return 0
        self._heard(source)
        if not self._names_matter:
            return self._told.removed(replica, event.block_hashes, event.medium)
        if source.names is not None and event.medium not in _DEVICE and self._told.unkept[replica]:
            event = self._kept(replica, event, source.names)
        hashes = source.removed(event)
        if source.doubt is not None and event.medium in _DEVICE:
            hashes = list(hashes)
            if source.doubt.removed(hashes):
                source.doubt = None
                self._sort()
        return self._told.removed(replica, hashes, event.medium)

    def _kept(self, replica: int, event: BlocksRemoved, names: EngineNames) -> BlocksRemoved:
        """Of the removed blocks those that were kept: others have no name there, or only the device's."""
        kept = []
        for value in event.block_hashes:
            key = names.key(value)
            if key is not None and self._told.copies(replica, key, event.medium or DEVICE_MEDIUM):
                kept.append(value)
        return BlocksRemoved(tuple(kept), event.medium)

    def _heard(self, source: BlockSource) -> None:
        source.events += 1
        if source.events == 1:
            source.telling = True
            self._sort()

    def cleared(self, replica: int) -> None:
        """The replica holds nothing any more: it said so, or it restarted."""
        self._told.cleared(replica)
        self._sources[replica].forget()
        self._guessed.clear(replica)
        self._sort()

    def missed(self, replica: int) -> None:
        """Events were lost for good: what is not told is guessed until the cache has turned over."""
        source, held = self._sources[replica], self._told.held(replica)
        source.pending.clear()
        if source.doubt is not None:
            source.doubt.again(held)
        elif source.telling:
            most = max(1, self._capacity_tokens[replica] // source.naming.block_tokens)
            source.doubt = EventDoubt(held, most)
            self._sort()

    def seems_empty(self, replica: int) -> bool:
        """The replica seems to have lost its cache; False, and nothing changed, where events would tell."""
        source = self._sources[replica]
        if source.telling and source.doubt is None:
            return False
        doubt = source.doubt
        self.cleared(replica)
        if doubt is not None:  # events may still be missing from after it lost its cache
            source.doubt = doubt
            self._sort()
        return True

    def blocks_reported(self, replica: int, block_tokens: int | None, algorithm: str | None) -> None:
        """The replica's own report names its block size and hash algorithm."""
        if self._sources[replica].reported(block_tokens, algorithm, self._noticed(replica)):
            self._renamed(replica)

    def set_capacity(self, replica: int, tokens: int) -> None:
        """The replica's KV memory holds so many tokens."""
        self._capacity_tokens[replica] = tokens
        self._bound(replica)

    def _renamed(self, replica: int) -> None:
        """The replica's blocks have other names now; what was known under the old ones is lost."""
        self.cleared(replica)
        self._bound(replica)
        self._sort()

    def _bound(self, replica: int) -> None:
        size = self._sources[replica].naming.block_tokens
        blocks = max(1, self._capacity_tokens[replica] // size)
        self._guessed.set_capacity(replica, blocks)
        self._told.set_capacity(replica, blocks)

    def _noticed(self, replica: int) -> Callable[[str], None]:
        return lambda text: self.notices.append((replica, text))

    def _sort(self) -> None:
        """By naming: the replicas whose events count and those whose cache is guessed, as bits."""
        masks: dict[BlockNaming, tuple[int, int]] = {}
        for replica, source in self._sources.items():
            telling, guessing = masks.get(source.naming, (0, 0))
            bit = 1 << replica
            masks[source.naming] = (telling | bit, guessing) if source.telling else (telling, guessing | bit)
        self._masks = masks
        self._doubted = sum(1 << replica for replica, source in self._sources.items() if source.doubt)

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if any part disagrees with itself. O(everything)."""
        self._told.check_invariants()
        self._guessed.check_invariants()
        for replica, source in self._sources.items():
            telling, guessing = self._masks[source.naming]
            assert bool(telling >> replica & 1) == source.telling
            assert bool(guessing >> replica & 1) != source.telling
            assert (source.names is not None) == (source.naming.scheme == "tokens")
            assert bool(self._doubted >> replica & 1) == (source.doubt is not None)


def _tokens(level: tuple[int, int]) -> int:
    return level[1]
