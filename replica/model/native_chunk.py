"""A prefill chunk's attention in bf16 by a kernel of our own (``_chunk_attention.c``), where it was built.

It reads K and V in the blocks they lie in and keeps scores in fp32. SmolLM2, two cores of a Zen 4, ms for
all layers, beside ``attention_products``: 105 queries after 896 keys 25 and 46, 489 after 512 86 and 178,
512 after none 34 and 90.
"""

import torch

from replica.model.paged_kv import PagedKv
from replica.model.step_plan import PrefillSpan

try:  # after torch: they share its OpenMP
    from replica.model import _chunk_attention as kernel
except ImportError:
    kernel = None  # type: ignore[assignment]

MOST_DIM = 512


def is_native(kv: PagedKv) -> bool:
    """The kernel is there, runs on this processor, and knows such K and V."""
    known = kv.dtype == torch.bfloat16 and not kv.int8 and kv.head_dim % 64 == 0 and kv.head_dim <= MOST_DIM
    return known and kernel is not None and kernel.supported()


class KernelMemory:
    """Memory of the kernel, the same in every step."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, size: int) -> torch.Tensor:
        """So many bytes or more, until the next call."""
        if size > self._memory.shape[0]:
            self._memory = torch.empty(max(size, 2 * self._memory.shape[0]), dtype=torch.uint8)
        return self._memory


class NativeChunk:
    """One chunk of a step: made once, called for every layer."""

    def __init__(
        self, span: PrefillSpan, kv: PagedKv, heads: int, out: torch.Tensor, memory: KernelMemory
    ) -> None:
        """``heads``: query heads. ``out`` [tokens or more, heads * head_dim], bf16: where results go."""
        self._span = span
        self._kv = kv
        self._threads = torch.get_num_threads()
        rows, context = span.stop - span.first, span.prefix + span.stop - span.first
        self._work = memory.take(kernel.room(kv.heads, kv.head_dim, context, self._threads))
        self._table = torch.zeros(1, dtype=torch.int64) if span.blocks is None else span.blocks
        self._out = out[span.first : span.stop]
        self._shape = (kv.heads, heads // kv.heads, kv.head_dim, rows, span.prefix)

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        """``queries`` and ``kv`` are the step's, as ``PagedAttention`` gets them."""
        span = self._span
        own = queries[span.first : span.stop]
        # [blocks, tokens, 2 * kv_heads, head_dim]; without a prefix the step's own are one block.
        blocks = kv[None, span.first : span.stop] if span.blocks is None else self._kv.layer(layer)
        kernel.attend(
            own.data_ptr(),
            blocks.data_ptr(),
            self._table.data_ptr(),
            self._out.data_ptr(),
            self._work.data_ptr(),
            own.stride(0),
            blocks.stride(0),
            blocks.stride(1),
            self._out.stride(0),
            blocks.shape[1],
            *self._shape,
            window or 0,
            self._threads,
        )
