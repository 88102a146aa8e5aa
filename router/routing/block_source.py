"""One replica as a source of KV events: how it names blocks, whether that is so, whether to trust it.

Names are the engine's own where the router can reproduce them (``block_naming``). That is checked, not
assumed: the first prompt announced from its beginning is hashed here, and if the names differ the replica is
switched to translation through tokens (``engine_names``). A block size that differs from the configured one
is the replica's to say: the replica's is used. Each of these leaves a notice; nothing is silent.

Trust is earned by each finished request: some new block of it should have been announced. When
``SILENT_AFTER`` in a row were not, the stream is lost or the router tokenizes differently from the engine,
and what events told is not used until one is announced again. Where batches are known to be lost, what they
do not tell is guessed for a while (``event_doubt``).
"""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from replica.contract.kv_events import BlockHash, BlocksRemoved, BlocksStored
from replica.contract.multimodal import MultimodalItem
from router.routing.block_index import block_name
from router.routing.block_naming import DEFAULT_BLOCK_TOKENS, BlockNaming, HashScheme
from router.routing.engine_names import EngineNames
from router.routing.event_doubt import EventDoubt

SILENT_AFTER = 8

_ENGINE_ALGORITHMS: dict[str, HashScheme] = {
    "sha256": "sha256",
    "sha256_cbor": "sha256_cbor",
    "warmroute": "warmroute",
}


@dataclass(frozen=True, slots=True)
class BlockSettings:
    """What the operator says of a replica's blocks; ``None`` is "find out"."""

    scheme: HashScheme | None = None
    block_tokens: int | None = None
    seed: str | None = None


class BlockSource:
    """Changed by the exact index alone. Methods that may rename its blocks answer whether they did."""

    __slots__ = (
        "_seen_block_tokens",
        "_settings",
        "_verified",
        "announced",
        "doubt",
        "events",
        "names",
        "naming",
        "other_groups",
        "pending",
        "telling",
        "unannounced",
    )

    def __init__(self, settings: BlockSettings) -> None:
        self._settings = settings
        self._verified = False
        self._seen_block_tokens: int | None = None
        self.naming = BlockNaming(
            settings.scheme or "tokens", settings.block_tokens or DEFAULT_BLOCK_TOKENS, settings.seed
        )
        self.names: EngineNames | None = EngineNames() if self.naming.scheme == "tokens" else None
        """Set where hashes are translated."""
        self.telling = False
        """Its events are the truth."""
        self.doubt: EventDoubt | None = None
        """Set while some of its events are lost and its cache has not turned over since."""
        self.events = 0
        self.other_groups = 0
        """Events of cache groups that are not looked at: of a hybrid model only the first is."""
        self.announced = 0
        """Finished requests with new blocks of which an event told."""
        self.unannounced = 0
        """Finished requests whose new blocks no event announced."""
        self.pending: deque[int] = deque(maxlen=SILENT_AFTER)
        """One new block each of the last finished requests that no event has announced yet."""

    # --- names ----------------------------------------------------------------------------------

    def stored(self, event: BlocksStored) -> tuple[Iterable[BlockHash], BlockHash | None]:
        """The event's blocks and their parent under the names that prompts have here."""
        if self.names is None:
            return event.block_hashes, event.parent_hash
        return self.names.stored(event)

    def removed(self, event: BlocksRemoved) -> Iterable[BlockHash]:
        """The removed blocks under the names that prompts have here."""
        return event.block_hashes if self.names is None else self.names.removed(event)

    def forget(self) -> None:
        """Nothing it told counts any more, and nothing is missing."""
        self.doubt = None
        if self.names is not None:
            self.names.cleared()
        self.pending.clear()

    def check(self, event: BlocksStored, notice: Callable[[str], None]) -> bool:
        """Compare the event's block size and names with ours; True if blocks have other names now."""
        renamed = False
        if event.block_size != self._seen_block_tokens and event.block_size > 0:
            self._seen_block_tokens = event.block_size
            renamed = self._use_block_tokens(event.block_size, notice)
        if self.names is None and not self._verified:
            renamed |= self._verify(event, notice)
        return renamed

    def _verify(self, event: BlocksStored, notice: Callable[[str], None]) -> bool:
        """Hash the head of a prompt that is announced from its beginning."""
        if event.parent_hash is not None or event.adapter is not None or not event.block_hashes:
            return False
        images = event.multimodal(0)
        items = [MultimodalItem(name, offset, 1) for name, offset in images]
        try:
            (name,) = self.naming.keys(event.token_ids[: event.block_size], event.salt, items)
        except (TypeError, ValueError, OverflowError):
            return False
        if name == block_name(event.block_hashes[0]):
            self._verified = True
            return False
        extra = event.extra_keys[0] if event.extra_keys else None
        if extra and len(extra) > len(images) + (event.salt is not None):
            return False  # embeddings and the like: more is hashed than the event lets us know
        notice(
            f"its block hashes are not {self.naming.scheme}'s (another algorithm, or a PYTHONHASHSEED that "
            "block_hash_seed does not name): they are translated through the tokens in its events"
        )
        self._rename(replace(self.naming, scheme="tokens"))
        return True

    def reported(
        self, block_tokens: int | None, algorithm: str | None, notice: Callable[[str], None]
    ) -> bool:
        """Its metrics name its block size and algorithm. Once events were seen, they know better."""
        if self.events:
            return False
        renamed = False
        scheme = self.naming.scheme
        if self._settings.scheme is None and algorithm is not None:
            scheme = _ENGINE_ALGORITHMS.get(algorithm, "tokens")
        if scheme != self.naming.scheme:
            self._rename(replace(self.naming, scheme=scheme))
            renamed = True
        if block_tokens is not None and block_tokens > 0:
            renamed |= self._use_block_tokens(block_tokens, notice)
        return renamed

    def _use_block_tokens(self, block_tokens: int, notice: Callable[[str], None]) -> bool:
        if block_tokens == self.naming.block_tokens:
            return False
        if self._settings.block_tokens is not None:
            notice(
                f"blocks of {self._settings.block_tokens} tokens are configured, it has blocks of "
                f"{block_tokens}: {block_tokens} is used; correct block_size in the config"
            )
        self._rename(replace(self.naming, block_tokens=block_tokens))
        return True

    def _rename(self, naming: BlockNaming) -> None:
        self.naming = naming
        self.names = EngineNames() if naming.scheme == "tokens" else None
        self._verified = False

    # --- trust ----------------------------------------------------------------------------------

    def answered(self, new_block: int, holds: Callable[[int], bool], notice: Callable[[str], None]) -> bool:
        """A request finished that must have stored ``new_block``; True if trust in its events changed.

        An event may come a little after the answer: the last few are looked at again each time.
        """
        before = self.telling
        if len(self.pending) == SILENT_AFTER:
            self.unannounced += 1
        self.pending.append(new_block)
        found = [name for name in self.pending if holds(name)]
        for name in found:
            self.pending.remove(name)
        self.announced += len(found)
        if found:
            self.telling = True
        elif len(self.pending) == SILENT_AFTER:
            self.telling = False
        if before and not self.telling:
            notice(
                f"{SILENT_AFTER} requests in a row had new blocks that no event announced (events lost, or "
                "the router tokenizes differently from the engine): its cache is guessed from now on"
            )
        elif self.telling and not before:
            notice("new blocks are announced again: its events are trusted")
        return before is not self.telling
