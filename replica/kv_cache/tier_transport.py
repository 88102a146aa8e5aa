"""The seam between deciding about tiers and moving bytes: orders, reports, and what a mover is."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from replica.contract.kv_events import BlockHash
from replica.kv_cache.fetch_plan import FetchPlan, Tier
from replica.prefix_load import PrefixLoad


@dataclass(frozen=True, slots=True)
class Save:
    """Copy a block's KV from the device to ``target``, before the next step writes over ``blocks``."""

    block_hash: BlockHash
    blocks: tuple[int, ...]
    """Table entries that hold it, in order of position."""
    target: Tier = Tier.HOST


@dataclass(frozen=True, slots=True)
class Spill:
    """Copy a block from host to disk, when there is time; the host keeps it meanwhile."""

    block_hash: BlockHash
    checksum: int | None


@dataclass(frozen=True, slots=True)
class Drop:
    """Delete a block's bytes. Nobody reads or writes them."""

    block_hash: BlockHash
    tier: Tier


Order = Save | Spill | Drop
"""To be begun in the order given."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """A fetch in flight: what to copy, with the checksums the bytes must have."""

    number: int
    plan: FetchPlan
    block_hashes: tuple[BlockHash, ...]
    """Of the blocks to fetch, in order."""
    checksums: tuple[int | None, ...]
    """None: not known here (a peer sends its own)."""
    peer: str | None
    """Whom blocks from Tier.PEER are asked of."""
    epoch: int
    """Of ``Tiers`` when it began."""


class Trouble(Enum):
    """Why a fetch ended before its last block."""

    CORRUPT = "corrupt"
    """A block's bytes have another checksum, or another length."""
    FAILED = "failed"
    """The tier did not answer, or with an error."""
    GONE = "gone"
    """A peer has it no more; it is well."""
    LATE = "late"
    """``give_up_s`` passed."""
    ABORTED = "aborted"
    """Nobody wants it any more."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was read from one tier, and how long that took."""

    tier: Tier
    size_bytes: int
    """In a fetch that was given up, what had come until then."""
    seconds: float


@dataclass(frozen=True, slots=True)
class FetchResult:
    """How a fetch ended. ``arrived`` blocks, from the first, are whole on the device."""

    arrived: int
    transfers: tuple[Transfer, ...]
    trouble: Trouble | None = None
    """What happened to block number ``arrived``."""


@dataclass(frozen=True, slots=True)
class PeerOffer:
    """Another replica that holds the first ``blocks`` of a prompt, as far as we know."""

    name: str
    blocks: int


class TierMover(Protocol):
    """Moves bytes and reports every end to ``Tiers``; its errors are reports, never exceptions.

    Per step: ``schedule``, then ``carry_out(tiers.evicted(cache.take_evictions()))``, then the model. Per
    request: ``tiers.plan``; ``tiers.begin`` keeps the sources; ``loads.begin`` makes room, and what that
    evicts is carried out before ``fetch`` (no room: ``tiers.ended`` with ABORTED); as blocks come
    ``loads.arrived``; at the end ``tiers.ended``, ``scheduler.add``, ``loads.end``.
    """

    def carry_out(self, orders: Sequence[Order]) -> None:
        """Begin these. Device memory of every ``Save`` is read before this returns."""

    def fetch(self, fetch: Fetch, load: PrefixLoad) -> None:
        """Begin to copy ``fetch.block_hashes``, in order, into ``load.blocks``.

        Each block is checked against its checksum before it counts as arrived.
        """
