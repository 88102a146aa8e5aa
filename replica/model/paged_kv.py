"""The memory behind the block tables: K and V of every layer, block by block."""

from collections.abc import Iterable

import numpy as np
import torch

from replica.model.shape import ModelShape


class PagedKv:
    """K and V per layer as [blocks, block_size, kv_heads, head_dim].

    Memory is taken from the system when a block is first written, and reads as zero before: padding in a
    batched gather must be finite even where nothing was stored.
    """

    def __init__(self, shape: ModelShape, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self._keys = [self._zeros(dtype) for _ in range(shape.layers)]
        self._values = [self._zeros(dtype) for _ in range(shape.layers)]
        self._gathered_keys = torch.empty(0, block_size, self.heads, self.head_dim, dtype=dtype)
        self._gathered_values = torch.empty_like(self._gathered_keys)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * len(self._keys) * self.heads * self.head_dim * self._keys[0].itemsize

    def _zeros(self, dtype: torch.dtype) -> torch.Tensor:
        # numpy asks the system for zero pages (calloc); torch.zeros would write, and so take, all of them.
        elements = self.blocks * self.block_size * self.heads * self.head_dim
        raw = torch.from_numpy(np.zeros(elements * dtype.itemsize, dtype=np.uint8))
        return raw.view(dtype).view(self.blocks, self.block_size, self.heads, self.head_dim)

    def store(self, layer: int, slots: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``keys`` and ``values`` [tokens, kv_heads, head_dim]; slot = block * block_size + offset."""
        self._keys[layer].flatten(0, 1).index_copy_(0, slots, keys)
        self._values[layer].flatten(0, 1).index_copy_(0, slots, values)

    def gather(self, layer: int, blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Copies of these blocks, [len(blocks), block_size, kv_heads, head_dim]; valid until the next call.

        The copies live in one workspace: fresh memory of this size costs more in page faults than the
        copying itself.
        """
        count = blocks.shape[0]
        if count > self._gathered_keys.shape[0]:
            room = (max(count, 2 * self._gathered_keys.shape[0]), *self._gathered_keys.shape[1:])
            self._gathered_keys = self._gathered_keys.new_empty(room)
            self._gathered_values = self._gathered_values.new_empty(room)
        keys, values = self._gathered_keys[:count], self._gathered_values[:count]
        torch.index_select(self._keys[layer], 0, blocks, out=keys)
        torch.index_select(self._values[layer], 0, blocks, out=values)
        return keys, values

    # Whole blocks on their way to and from other memory

    def slots(self, blocks: Iterable[int]) -> torch.Tensor:
        """The slots of these blocks, in order."""
        size = self.block_size
        return (torch.tensor(list(blocks))[:, None] * size + torch.arange(size)).flatten()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of all layers' K and V at ``slots``: [layers, 2, slots, kv_heads, head_dim]."""
        planes = [
            plane.flatten(0, 1)[slots]
            for pair in zip(self._keys, self._values, strict=True)
            for plane in pair
        ]
        return torch.stack(planes).view(len(self._keys), 2, -1, self.heads, self.head_dim)

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store what ``read`` gave, at ``slots``."""
        for layer, (keys, values) in enumerate(kv.unbind()):
            self.store(layer, slots, keys, values)

    @staticmethod
    def to_bytes(kv: torch.Tensor) -> memoryview:
        """The bytes of what ``read`` gave, not copied."""
        return kv.contiguous().flatten().view(torch.uint8).numpy().data

    def from_bytes(self, content: bytearray) -> torch.Tensor:
        """What ``to_bytes`` made bytes of; shares their memory."""
        flat = torch.frombuffer(content, dtype=self._keys[0].dtype)
        return flat.view(len(self._keys), 2, -1, self.heads, self.head_dim)
