"""The memory behind the block tables: K and V of every layer, block by block."""

from collections.abc import Iterable

import numpy as np
import torch

from replica.model.shape import ModelShape


class PagedKv:
    """K and V per layer as [blocks, block_size, 2 * kv_heads, head_dim], K heads first.

    Memory is taken from the system when a block is first written, and reads as zero before: padding in a
    batched gather must be finite even where nothing was stored.
    """

    def __init__(self, shape: ModelShape, blocks: int, block_size: int, dtype: torch.dtype) -> None:
        self.blocks = blocks
        self.block_size = block_size
        self.heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self._layers = [self._zeros(dtype) for _ in range(shape.layers)]
        self._gathered = torch.empty(0, *self._layers[0].shape[1:], dtype=dtype)

    @property
    def bytes_per_token(self) -> int:
        """K and V of one token over all layers."""
        return 2 * len(self._layers) * self.heads * self.head_dim * self._layers[0].itemsize

    def _zeros(self, dtype: torch.dtype) -> torch.Tensor:
        # numpy asks the system for zero pages (calloc); torch.zeros would write, and so take, all of them.
        elements = self.blocks * self.block_size * 2 * self.heads * self.head_dim
        raw = torch.from_numpy(np.zeros(elements * dtype.itemsize, dtype=np.uint8))
        return raw.view(dtype).view(self.blocks, self.block_size, 2 * self.heads, self.head_dim)

    def store(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [tokens, 2 * kv_heads, head_dim]; slot = block * block_size + offset."""
        self._layers[layer].flatten(0, 1).index_copy_(0, slots, kv)

    def gather(self, layer: int, blocks: torch.Tensor) -> torch.Tensor:
        """A copy of these blocks, [len(blocks), block_size, 2 * kv_heads, head_dim]; until the next call.

        The copies live in one workspace: fresh memory of this size costs more in page faults than the
        copying itself.
        """
        count = blocks.shape[0]
        if count > self._gathered.shape[0]:
            room = max(count, 2 * self._gathered.shape[0])
            self._gathered = self._gathered.new_empty(room, *self._gathered.shape[1:])
        return torch.index_select(self._layers[layer], 0, blocks, out=self._gathered[:count])

    # Whole blocks on their way to and from other memory

    def slots(self, blocks: Iterable[int]) -> torch.Tensor:
        """The slots of these blocks, in order."""
        size = self.block_size
        return (torch.tensor(list(blocks))[:, None] * size + torch.arange(size)).flatten()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of all layers' K and V at ``slots``: [layers, 2, slots, kv_heads, head_dim]."""
        rows = [layer.flatten(0, 1)[slots] for layer in self._layers]
        planes = torch.stack(rows)
        planes = planes.view(len(rows), -1, 2, self.heads, self.head_dim)
        return planes.transpose(1, 2).contiguous()

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store what ``read`` gave, at ``slots``."""
        for layer, planes in enumerate(kv.unbind()):
            self.store(layer, slots, torch.cat(planes.unbind(), 1))

    @staticmethod
    def to_bytes(kv: torch.Tensor) -> memoryview:
        """The bytes of what ``read`` gave, not copied."""
        return kv.contiguous().flatten().view(torch.uint8).numpy().data

    def from_bytes(self, content: bytearray) -> torch.Tensor:
        """What ``to_bytes`` made bytes of; shares their memory."""
        flat = torch.frombuffer(content, dtype=self._layers[0].dtype)
        return flat.view(len(self._layers), 2, -1, self.heads, self.head_dim)
