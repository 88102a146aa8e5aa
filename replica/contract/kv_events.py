"""What a prefix cache tells of its blocks: stored, removed, cleared. (Wire form: ``kv_events_wire``.)"""

from dataclasses import dataclass

from replica.contract.multimodal import MultimodalKey

BlockHash = bytes | int
"""A digest, or its unsigned 64-bit form (vLLM's default on the wire), or a simulator's opaque block id."""

DEVICE_MEDIUM = "GPU"
"""vLLM's word for the tier that attention reads from, whatever the device is."""

ExtraKeys = tuple[object, ...]
"""What separates a block from one with equal tokens: adapter name, (image id, offset), salt; untagged."""


@dataclass(frozen=True, slots=True)
class BlocksStored:
    """A run of consecutive blocks whose KV is computed and can be hit from now on.

    Ours announces a hash when its first copy is stored and withdraws it when its last is gone; vLLM
    announces every copy, so a reader of both counts copies per hash.
    """

    block_hashes: tuple[BlockHash, ...]
    parent_hash: BlockHash | None
    """Hash of the block before the run; None at the start of a prompt."""
    token_ids: tuple[int, ...]
    """``block_size`` ids per hash; empty when the blocks are simulated."""
    block_size: int
    adapter: str | None = None
    medium: str | None = DEVICE_MEDIUM
    extra_keys: tuple[ExtraKeys | None, ...] | None = None
    """Per block, or None when no block has any."""
    group: int | None = 0
    """Of layers that share block tables, as vLLM counts them; None: the engine does not say."""

    @property
    def salt(self) -> str | None:
        """The cache salt: the text in the first block's extra keys that is not the adapter's name.

        Only a run at the start of a prompt carries it (``parent_hash`` is None); later runs inherit it.
        """
        if self.parent_hash is not None or not self.extra_keys or not self.extra_keys[0]:
            return None
        texts = [key for key in self.extra_keys[0] if isinstance(key, str)]
        if self.adapter is not None and texts and texts[0] == self.adapter:
            texts = texts[1:]
        return texts[-1] if texts else None

    def multimodal(self, block: int) -> tuple[MultimodalKey, ...]:
        """Of the images that reach into the run's block number ``block``, as far as the event tells.

        >>> keys = (("lora", ("cat", 1), "s"), ("lora", ("cat", -1)))
        >>> BlocksStored((1, 2), None, (7, 8, 9, 9), 2, "lora", extra_keys=keys).multimodal(1)
        (('cat', -1),)
        """
        extra = self.extra_keys[block] if self.extra_keys and block < len(self.extra_keys) else None
        return tuple(
            (key[0], key[1])
            for key in extra or ()
            if isinstance(key, tuple)
            and len(key) == 2
            and isinstance(key[0], str)
            and isinstance(key[1], int)
        )


@dataclass(frozen=True, slots=True)
class BlocksRemoved:
    """Blocks that can no longer be hit: their memory was taken for something else."""

    block_hashes: tuple[BlockHash, ...]
    medium: str | None = DEVICE_MEDIUM
    group: int | None = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Nothing can be hit any more."""


CacheEvent = BlocksStored | BlocksRemoved | CacheCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """The events of one engine step, in order."""

    timestamp_s: float
    events: tuple[CacheEvent, ...]
    data_parallel_rank: int | None = None
