"""The memory behind the block tables: K and V of every layer, block by block."""

from collections.abc import Iterable

import numpy as np
import torch

from replica.model.shape import ModelShape

SCALE_BYTES = 4
"""int8: each row of a head ends with its scale, an fp32 number, so that it lives and dies with the block."""
LARGEST_CODE = 127


class PagedKv:
    """K and V per layer as [blocks, block_size, 2 * kv_heads, width], K heads first.

    ``width`` is head_dim numbers of ``dtype``, or with ``int8`` head_dim codes and their scale.

    Memory is taken from the system when a block is first written, and reads as zero before: padding in a
    batched gather must be finite even where nothing was stored.
    """

    def __init__(
        self, shape: ModelShape, blocks: int, block_size: int, dtype: torch.dtype, *, int8: bool = False
    ) -> None:
        """``dtype``: of what is stored and copied; with ``int8`` it is rounded on the way in."""
        self.blocks = blocks
        self.block_size = block_size
        self.heads = shape.kv_heads
        self.head_dim = shape.head_dim
        self.int8 = int8
        self.bytes_per_token = bytes_per_token(shape, dtype, int8=int8)
        self.dtype = dtype
        self._places = [layer for layer in range(shape.layers) if layer not in shape.recurrent]
        self._layers = [self._zeros(shape.head_dim) for _ in self._places]
        self._place_of = {layer: place for place, layer in enumerate(self._places)}
        self._gathered = self._layers[0].new_empty(0, *self._layers[0].shape[1:])

    def _zeros(self, head_dim: int) -> torch.Tensor:
        # numpy asks the system for zero pages (calloc); torch.zeros would write, and so take, all of them.
        dtype = torch.int8 if self.int8 else self.dtype
        width = head_dim + SCALE_BYTES if self.int8 else head_dim
        elements = self.blocks * self.block_size * 2 * self.heads * width
        raw = torch.from_numpy(np.zeros(elements * dtype.itemsize, dtype=np.uint8))
        return raw.view(dtype).view(self.blocks, self.block_size, 2 * self.heads, width)

    def store(self, layer: int, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [tokens, 2 * kv_heads, head_dim]; slot = block * block_size + offset."""
        self._put(layer, slots, _to_codes(kv) if self.int8 else kv)

    def context(self, blocks: torch.Tensor) -> "Context":
        """Copies of these blocks, [len(blocks), block_size, 2 * kv_heads, head_dim]."""
        room = self._workspace(blocks.shape[0])
        return Context(self, blocks, room, room)

    def context_by_head(self, blocks: torch.Tensor) -> "Context":
        """Copies of these blocks, [2 * kv_heads, len(blocks) * block_size, head_dim]."""
        count = blocks.shape[0]
        room = self._workspace(count).view(2 * self.heads, count, self.block_size, -1)
        return Context(self, blocks, room.permute(1, 2, 0, 3), room.flatten(1, 2))

    def copy_blocks(self, layer: int, blocks: torch.Tensor, out: torch.Tensor) -> None:
        """Copy blocks as stored into ``out`` [len(blocks), block_size, 2 * kv_heads, width]."""
        torch.index_select(self._layers[self._place_of[layer]], 0, blocks, out=out)

    def _workspace(self, count: int) -> torch.Tensor:
        """Room for copies of ``count`` blocks, the same each time.

        Fresh memory of this size costs more in page faults than the copying itself.
        """
        if count > self._gathered.shape[0]:
            room = max(count, 2 * self._gathered.shape[0])
            self._gathered = self._gathered.new_empty(room, *self._gathered.shape[1:])
        return self._gathered[:count]

    def _put(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._layers[self._place_of[layer]].flatten(0, 1).index_copy_(0, slots, rows)

    # Whole blocks on their way to and from other memory

    def slots(self, blocks: Iterable[int]) -> torch.Tensor:
        """The slots of these blocks, in order."""
        size = self.block_size
        return (torch.tensor(list(blocks))[:, None] * size + torch.arange(size)).flatten()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of all layers' K and V at ``slots``, as stored: [layers, 2, slots, kv_heads, width]."""
        rows = [layer.flatten(0, 1)[slots] for layer in self._layers]
        planes = torch.stack(rows)
        planes = planes.view(len(rows), -1, 2, self.heads, planes.shape[-1])
        return planes.transpose(1, 2).contiguous()

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store what ``read`` gave, at ``slots``."""
        for layer, planes in zip(self._places, kv.unbind(), strict=True):
            self._put(layer, slots, torch.cat(planes.unbind(), 1))

    @staticmethod
    def to_bytes(kv: torch.Tensor) -> memoryview:
        """The bytes of what ``read`` gave, not copied."""
        return kv.contiguous().flatten().view(torch.uint8).numpy().data

    def from_bytes(self, content: bytearray) -> torch.Tensor:
        """What ``to_bytes`` made bytes of; shares their memory."""
        flat = torch.frombuffer(content, dtype=self._layers[0].dtype)
        return flat.view(len(self._layers), 2, -1, self.heads, self._layers[0].shape[-1])


class Context:
    """Copies of some blocks' K and V, of one layer at a time; all contexts share one workspace."""

    def __init__(self, kv: PagedKv, blocks: torch.Tensor, room: torch.Tensor, copied: torch.Tensor) -> None:
        """``room``: where copies go, block by block; ``copied``: its memory in the order of ``values``."""
        self._kv = kv
        self._blocks = blocks
        self._room = room
        self._copied = copied
        self.values = copied
        """What was loaded last; meaningless once another context was."""
        if kv.int8:
            self.values = torch.empty(*copied.shape[:-1], kv.head_dim, dtype=kv.dtype)

    def load(self, layer: int) -> None:
        """Copy the blocks of ``layer`` into ``values``."""
        self._kv.copy_blocks(layer, self._blocks, self._room)
        if self._kv.int8:
            _from_codes(self._copied, self.values)


def bytes_per_token(shape: ModelShape, dtype: torch.dtype, *, int8: bool = False) -> int:
    """Bytes of K and V that one token takes over all layers.

    >>> from replica.model.shape import Rotary
    >>> shape = ModelShape(30, 576, 9, 3, 64, 1536, 49152, 8192, 1e-5, Rotary(1e5), False, False, False,
    ...                    True, (None,) * 30)
    >>> bytes_per_token(shape, torch.float32)                  # 30 layers x K and V x 3 heads x 64 x 4 bytes
    46080
    >>> bytes_per_token(shape, torch.float32, int8=True)       # 30 layers x K and V x 3 heads x 64 + 4
    12240
    """
    width = shape.head_dim + SCALE_BYTES if int8 else shape.head_dim * dtype.itemsize
    return (shape.layers - len(shape.recurrent)) * 2 * shape.kv_heads * width


def _to_codes(kv: torch.Tensor) -> torch.Tensor:
    """[..., head_dim] numbers to [..., head_dim + SCALE_BYTES] int8."""
    values = kv.float()
    scales = values.abs().amax(-1, keepdim=True).div_(LARGEST_CODE)
    codes = values.div_(scales.clamp(min=torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
    return torch.cat([codes, scales.view(torch.int8)], -1)


def _from_codes(rows: torch.Tensor, out: torch.Tensor) -> None:
    """The reverse of ``_to_codes``, into ``out``."""
    scales = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    torch.mul(rows[..., :-SCALE_BYTES], scales, out=out)
