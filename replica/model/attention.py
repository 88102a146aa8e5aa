"""Attention over paged KV with torch's own kernels: padded batches for decode, one call per prefill chunk.

K and V are gathered block by block into a workspace. In decode the query heads that share a KV head become
its query rows, which keeps bf16 on the fast kernel. A chunk after a prefix is never given to ``is_causal``:
torch aligns that mask to the top left, which is wrong when queries are fewer than keys. In bf16 a
chunk goes to the fused kernel in runs of queries, folded as in decode, where the processor has AMX; else to
our own kernel (``native_chunk``) where that was built, or its attention is made of matrix products
(``attention_products``).
"""

import torch
import torch.nn.functional as functional

from replica.model.attention_masks import AttentionMasks
from replica.model.attention_products import QUERY_RUN, ChunkProducts, ScoreMemory
from replica.model.native_chunk import KernelMemory, NativeChunk, is_native
from replica.model.paged_kv import PagedKv
from replica.model.processor import has_amx
from replica.model.step_plan import DecodeGroup, PrefillSpan, StepPlan

QUERY_ROWS = 4
"""Batch-invariant: query rows come in multiples of this; with fewer, other kernels add in another order."""
SPARE_ROWS = 16
"""Batch-invariant: rows of finite, otherwise meaningless values that must follow the queries."""


class AttentionMemory:
    """What attention keeps from step to step."""

    def __init__(self) -> None:
        self.scores = ScoreMemory()
        self.kernel = KernelMemory()


class PagedAttention:
    """One step's attention: make it once per step, call it once per layer.

    A layer with a window of w lets a token attend to itself and the w - 1 tokens before it.
    """

    def __init__(
        self,
        plan: StepPlan,
        kv: PagedKv,
        heads: int,
        out: torch.Tensor,
        memory: AttentionMemory,
        *,
        batch_invariant: bool,
    ) -> None:
        """``heads``: query heads. ``out`` [tokens or more, heads * head_dim]: where each layer's result goes,
        in the type of queries, keys and values. ``memory``: of all steps.

        ``batch_invariant``: a query's result is the same to the last bit whoever else is in the call; needs
        a plan that pads contexts, and SPARE_ROWS.
        """
        masks = AttentionMasks(out.dtype)
        self._parts: list[_DecodeCall | _FusedChunk | _FoldedChunk | ChunkProducts | NativeChunk] = [
            _DecodeCall(group, kv, heads, out, masks, QUERY_ROWS if batch_invariant else 1)
            for group in plan.decodes
        ]
        if batch_invariant or out.dtype != torch.bfloat16:
            unit = QUERY_ROWS if batch_invariant else 1
            self._parts += [_FusedChunk(span, kv, out, masks, unit) for span in plan.prefills]
        elif has_amx():
            self._parts += [_FoldedChunk(span, kv, heads, out, masks) for span in plan.prefills]
        elif is_native(kv):
            self._parts += [NativeChunk(span, kv, heads, out, memory.kernel) for span in plan.prefills]
        else:
            self._parts += [
                ChunkProducts(span, kv, heads, out, masks, memory.scores) for span in plan.prefills
            ]

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        """Attend and write into ``out``.

        ``queries`` [tokens or more, heads, head_dim] and ``kv`` [tokens or more, 2 * kv_heads, head_dim] are
        this step's, already stored in the paged memory.
        """
        for part in self._parts:
            part(layer, window, queries, kv)


class _DecodeCall:
    """The rows of a group in one call of the fused kernel."""

    def __init__(
        self,
        group: DecodeGroup,
        kv: PagedKv,
        heads: int,
        out: torch.Tensor,
        masks: AttentionMasks,
        rows_unit: int,
    ) -> None:
        rows, dim = group.stop - group.first, kv.head_dim
        self._group = group
        self._masks = masks
        self._context = kv.context(group.blocks)
        gathered = self._context.values.view(rows, -1, 2 * kv.heads, dim)[:, : group.context]
        self._keys, self._values = gathered.transpose(1, 2).chunk(2, 1)
        self._folded = (rows, kv.heads, heads // kv.heads, dim)
        self._padding = -self._folded[2] % rows_unit
        self._out = out[group.first : group.stop].view(self._folded)

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        group = self._group
        self._context.load(layer)
        folded = queries[group.first : group.stop].view(self._folded)
        if self._padding:
            folded = functional.pad(folded, (0, 0, 0, self._padding))
        attended = functional.scaled_dot_product_attention(
            folded,
            self._keys,
            self._values,
            attn_mask=group.mask if window is None else self._masks.decode(group, window),
        )
        self._out.copy_(attended[:, :, : self._folded[2]] if self._padding else attended)


class _FusedChunk:
    """A chunk in one call of the fused kernel."""

    def __init__(
        self, span: PrefillSpan, kv: PagedKv, out: torch.Tensor, masks: AttentionMasks, rows_unit: int
    ) -> None:
        self._span = span
        self._masks = masks
        self._rows = span.stop - span.first
        self._padded = self._rows + -self._rows % rows_unit
        self._context = None if span.blocks is None else kv.context(span.blocks)
        self._out = out[span.first : span.stop]

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        span, rows = self._span, self._rows
        if self._context is None:
            context = kv[span.first : span.stop]
        else:
            self._context.load(layer)
            context = self._context.values.flatten(0, 1)
        keys, values = context.chunk(2, 1)
        whole = span.blocks is None and (window is None or window >= rows)
        mask = None
        if not whole:
            mask = self._masks.chunk(self._padded, keys.shape[0], span.prefix, window)
        attended = functional.scaled_dot_product_attention(
            queries[span.first : span.first + self._padded].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=whole,
            enable_gqa=True,
        )
        self._out.view(rows, *attended.shape[1::2]).copy_(attended[0].transpose(0, 1)[:rows])


class _FoldedChunk:
    """A chunk in one call of the fused kernel for each run of queries, the heads of a group as query rows.

    One core with AMX, ms a layer of SmolLM2: 105 queries after 903 keys 1.3, 489 after 512 6.8; by matrix
    products 1.6 and 9.1.
    """

    def __init__(
        self, span: PrefillSpan, kv: PagedKv, heads: int, out: torch.Tensor, masks: AttentionMasks
    ) -> None:
        rows, self._group = span.stop - span.first, heads // kv.heads
        self._span = span
        self._masks = masks
        self._context = None if span.blocks is None else kv.context(span.blocks)
        self._out = out[span.first : span.stop].view(rows, kv.heads, self._group, kv.head_dim)
        self._by_head = torch.empty(kv.heads, rows, self._group, kv.head_dim, dtype=out.dtype)
        self._folded = self._by_head.flatten(1, 2)[None]

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        span, group = self._span, self._group
        self._by_head.copy_(queries[span.first : span.stop].view(self._out.shape).transpose(0, 1))
        if self._context is None:
            context = kv[span.first : span.stop]
        else:
            self._context.load(layer)
            context = self._context.values.flatten(0, 1)
        keys, values = context.transpose(0, 1)[None].chunk(2, 1)
        rows = span.stop - span.first
        for first in range(0, rows, QUERY_RUN):
            stop = min(first + QUERY_RUN, rows)
            begin = 0 if window is None else max(0, span.prefix + first - window + 1)
            end = span.prefix + stop
            attended = functional.scaled_dot_product_attention(
                self._folded[:, :, first * group : stop * group],
                keys[:, :, begin:end],
                values[:, :, begin:end],
                attn_mask=self._masks.chunk(
                    stop - first, end - begin, span.prefix + first - begin, window, group
                ),
            )
            by_head = attended.view(-1, stop - first, *self._by_head.shape[2:])
            self._out[first:stop].copy_(by_head.transpose(0, 1))
