"""The memory behind the block tables: K and V of every layer, block by block."""

import math
from collections.abc import Iterable

import numpy as np
import torch

from replica.model.shape import ModelShape

SCALE_BYTES = 4
"""int8: each row of a head ends with its scale, an fp32 number, so that it lives and dies with the block."""
LARGEST_CODE = 127
AHEAD_BYTES = 256 * 2**20
"""So much memory beyond what was ever written is taken from the system while there is nothing else to do."""
PIECE_BYTES = 2 * 2**20
"""Taken at a time; 2 to 6 ms on a virtual machine whose host has to find the memory, too."""


class PagedKv:
    """K and V as [blocks, layers, block_size, 2 * kv_heads, width], K heads first.

    ``width`` is head_dim numbers of ``dtype``, or with ``int8`` head_dim codes and their scale.

    Memory is taken from the system when a block is first written, or a bit ahead of that (``take_ahead``),
    and reads as zero before: padding in a batched gather must be finite even where nothing was stored. All
    layers of a block lie together, so that every prompt pays for the pages it is the first to write. With
    memory of its own, each of SmolLM2's 30 layers began a page of 2 MiB in the same step: one prompt in
    2,730 tokens waited 50 to 180 ms more.
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
        kept = [layer for layer in range(shape.layers) if layer not in shape.recurrent]
        self._place_of = {layer: place for place, layer in enumerate(kept)}
        self.places = len(kept)
        """Layers that have K and V."""
        self._memory = self._zeros(shape.head_dim)
        self._used_blocks = 0
        self._taken_bytes = 0
        self._gathered = self._memory.new_empty(0, *self._memory.shape[2:])
        # From a layer's first block on, as if there were no other layers between: indices count those in.
        by_block = self._memory.flatten(0, 1)
        self._blocks_of = [by_block[place:] for place in range(self.places)]
        self._rows_of = [blocks.flatten(0, 1) for blocks in self._blocks_of]

    def _zeros(self, head_dim: int) -> torch.Tensor:
        # numpy asks the system for zero pages (calloc); torch.zeros would write, and so take, all of them.
        dtype = torch.int8 if self.int8 else self.dtype
        width = head_dim + SCALE_BYTES if self.int8 else head_dim
        shape = (self.blocks, self.places, self.block_size, 2 * self.heads, width)
        raw = torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8))
        return raw.view(dtype).view(shape)

    def rows(self, slots: torch.Tensor) -> torch.Tensor:
        """Where in memory ``slots`` (block * block_size + offset) are; the same for every layer."""
        if slots.shape[0]:
            self._used_blocks = max(self._used_blocks, int(slots.max()) // self.block_size + 1)
        return slots + (slots // self.block_size) * (self.block_size * (self.places - 1))

    def take_ahead(self) -> bool:
        """Take PIECE_BYTES from the system; False, doing nothing, once AHEAD_BYTES are there unused."""
        used = self._used_blocks * (self._memory.nbytes // self.blocks)
        begin = max(self._taken_bytes, used)
        end = min(begin + PIECE_BYTES, self._memory.nbytes)
        if begin == end or begin - used >= AHEAD_BYTES:
            return False
        # Nothing was ever stored there; numpy fills it without the interpreter's lock and on this core alone.
        self._memory.flatten().view(torch.uint8).numpy()[begin:end] = 0
        self._taken_bytes = end
        return True

    def store(self, layer: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        """Write ``kv`` [tokens, 2 * kv_heads, head_dim]; ``rows``: what ``rows()`` says."""
        self._put(self._place_of[layer], rows, _to_codes(kv) if self.int8 else kv)

    def layer(self, layer: int) -> torch.Tensor:
        """K and V of one layer as stored: [blocks, block_size, 2 * kv_heads, width], not copied."""
        return self._memory[:, self._place_of[layer]]

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
        """Copy blocks as stored into ``out`` [len(blocks), block_size, 2 * kv_heads, width].

        ``blocks``: their numbers times ``places``.
        """
        torch.index_select(self._blocks_of[self._place_of[layer]], 0, blocks, out=out)

    def _workspace(self, count: int) -> torch.Tensor:
        """Room for copies of ``count`` blocks, the same each time.

        Fresh memory of this size costs more in page faults than the copying itself.
        """
        if count > self._gathered.shape[0]:
            room = max(count, 2 * self._gathered.shape[0])
            self._gathered = self._gathered.new_empty(room, *self._gathered.shape[1:])
        return self._gathered[:count]

    def _put(self, place: int, rows: torch.Tensor, kv: torch.Tensor) -> None:
        self._rows_of[place].index_copy_(0, rows, kv)

    # Whole blocks on their way to and from other memory

    def slots(self, blocks: Iterable[int]) -> torch.Tensor:
        """The slots of these blocks, in order."""
        size = self.block_size
        return (torch.tensor(list(blocks))[:, None] * size + torch.arange(size)).flatten()

    def read(self, slots: torch.Tensor) -> torch.Tensor:
        """A copy of all layers' K and V at ``slots``, as stored: [layers, 2, slots, kv_heads, width]."""
        rows = self.rows(slots)
        planes = torch.stack([memory[rows] for memory in self._rows_of])
        planes = planes.view(*planes.shape[:2], 2, self.heads, planes.shape[-1])
        return planes.transpose(1, 2).contiguous()

    def write(self, slots: torch.Tensor, kv: torch.Tensor) -> None:
        """Store what ``read`` gave, at ``slots``."""
        rows = self.rows(slots)
        for place, planes in enumerate(kv.unbind()):
            self._put(place, rows, torch.cat(planes.unbind(), 1))

    @staticmethod
    def to_bytes(kv: torch.Tensor) -> memoryview:
        """The bytes of what ``read`` gave, not copied."""
        return kv.contiguous().flatten().view(torch.uint8).numpy().data

    def from_bytes(self, content: bytearray) -> torch.Tensor:
        """What ``to_bytes`` made bytes of; shares their memory."""
        flat = torch.frombuffer(content, dtype=self._memory.dtype)
        return flat.view(self.places, 2, -1, self.heads, self._memory.shape[-1])


class Context:
    """Copies of some blocks' K and V, of one layer at a time; all contexts share one workspace."""

    def __init__(self, kv: PagedKv, blocks: torch.Tensor, room: torch.Tensor, copied: torch.Tensor) -> None:
        """``room``: where copies go, block by block; ``copied``: its memory in the order of ``values``."""
        self._kv = kv
        self._blocks = blocks * kv.places
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
