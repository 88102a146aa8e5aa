"""Attention over paged KV with torch's own kernels: padded batches for decode, one call per prefill chunk.

K and V are gathered block by block into a workspace. In decode the query heads that share a KV head become
its query rows, which keeps bf16 on the fast kernel. A chunk after a prefix is never given to ``is_causal``:
torch aligns that mask to the top left, which is wrong when queries are fewer than keys.

In bf16 a chunk's attention is made of matrix products over runs of queries, with scores rounded to bf16 as
``transformers`` has them: 489 queries after 512 keys take 5 ms a layer on one core, torch's fused kernel 15.
"""

import torch
import torch.nn.functional as functional

from replica.model.paged_kv import PagedKv
from replica.model.step_plan import DecodeGroup, PrefillSpan, StepPlan

QUERY_ROWS = 4
"""Batch-invariant: query rows come in multiples of this; with fewer, other kernels add in another order."""
SPARE_ROWS = 16
"""Batch-invariant: rows of finite, otherwise meaningless values that must follow the queries."""
QUERY_RUN = 64
"""bf16: queries whose scores are computed together; they skip the keys after the last of them."""


class PagedAttention:
    """One step's attention: make it once per step, call it once per layer.

    A layer with a window of w lets a token attend to itself and the w - 1 tokens before it.
    """

    def __init__(
        self, plan: StepPlan, kv: PagedKv, heads: int, dtype: torch.dtype, *, batch_invariant: bool
    ) -> None:
        """``heads``: query heads. ``dtype``: of queries, keys and values.

        ``batch_invariant``: a query's result is the same to the last bit whoever else is in the call; needs
        a plan that pads contexts, and SPARE_ROWS.
        """
        self._plan = plan
        self._kv = kv
        self._group = heads // kv.heads
        self._rows_unit = QUERY_ROWS if batch_invariant else 1
        self._dtype = dtype
        self._fused = batch_invariant or dtype != torch.bfloat16
        self._masks: dict[tuple[int, ...], torch.Tensor] = {}

    def __call__(
        self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Attend and write into ``out`` [tokens, heads * head_dim].

        ``queries`` [tokens or more, heads, head_dim] and ``kv`` [tokens or more, 2 * kv_heads, head_dim] are
        this step's, already stored in the paged memory.
        """
        for index, group in enumerate(self._plan.decodes):
            mask = group.mask if window is None else self._decode_mask(index, group, window)
            self._decode(layer, group, mask, queries, out)
        for index, span in enumerate(self._plan.prefills):
            if span.blocks is None:
                context = kv[span.first : span.stop]
            else:
                context = self._kv.gather(layer, span.blocks).flatten(0, 1)
            keys, values = context.chunk(2, 1)
            attend = self._prefill if self._fused else self._prefill_in_runs
            out[span.first : span.stop] = attend(index, span, window, queries, keys, values)

    def _decode(
        self,
        layer: int,
        group: DecodeGroup,
        mask: torch.Tensor | None,
        queries: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        rows = group.stop - group.first
        kv, dim = self._kv, self._kv.head_dim
        context = kv.gather(layer, group.blocks).view(rows, -1, 2 * kv.heads, dim)[:, : group.context]
        keys, values = context.transpose(1, 2).chunk(2, 1)
        folded_shape = (rows, kv.heads, self._group, dim)
        folded = queries[group.first : group.stop].view(folded_shape)
        padding = -self._group % self._rows_unit
        if padding:
            folded = functional.pad(folded, (0, 0, 0, padding))
        attended = functional.scaled_dot_product_attention(folded, keys, values, attn_mask=mask)
        out[group.first : group.stop].view(folded_shape).copy_(attended[:, :, : self._group])

    def _prefill(
        self,
        index: int,
        span: PrefillSpan,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """[rows, heads * head_dim] by the fused kernel."""
        rows = span.stop - span.first
        whole = span.blocks is None and (window is None or window >= rows)
        padded = _up(rows, self._rows_unit)
        mask = None
        if not whole:
            mask = self._mask((index, window or 0), padded, keys.shape[0], span.prefix, window)
        attended = functional.scaled_dot_product_attention(
            queries[span.first : span.first + padded].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=mask,
            is_causal=whole,
            enable_gqa=True,
        )
        return attended[0].transpose(0, 1)[:rows].reshape(rows, -1)

    def _prefill_in_runs(
        self,
        index: int,
        span: PrefillSpan,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> torch.Tensor:
        """[rows, heads * head_dim] by matrix products, a run of queries at a time."""
        rows, heads, group, dim = span.stop - span.first, self._kv.heads, self._group, self._kv.head_dim
        scaled = (queries[span.first : span.stop] * dim**-0.5).view(rows, heads, group, dim).transpose(0, 1)
        keys_t, by_head = keys.permute(1, 2, 0), values.transpose(0, 1)
        attended = torch.empty(rows, heads, group, dim, dtype=self._dtype)
        for first in range(0, rows, QUERY_RUN):
            stop = min(first + QUERY_RUN, rows)
            count = stop - first
            begin = 0 if window is None else max(0, span.prefix + first - window + 1)
            end = span.prefix + stop
            folded = scaled[:, first:stop].reshape(heads, count * group, dim)
            scores = torch.bmm(folded, keys_t[:, :, begin:end]).view(heads, count, group, end - begin)
            if window is None:
                unseen = self._mask((-1, count), count, count, 0, None)
                scores[:, :, :, -count:] += unseen[:, None]
            else:
                key = (index, first, window)
                scores += self._mask(key, count, end - begin, span.prefix + first - begin, window)[:, None]
            shares = scores.softmax(-1).view(heads, count * group, end - begin)
            result = torch.bmm(shares, by_head[:, begin:end]).view(heads, count, group, dim)
            attended[first:stop] = result.transpose(0, 1)
        return attended.view(rows, -1)

    def _mask(
        self, key: tuple[int, ...], rows: int, context: int, prefix: int, window: int | None
    ) -> torch.Tensor:
        """[rows, context]: query row i, at position prefix + i, sees keys up to its own position."""
        found = self._masks.get(key)
        if found is None:
            found = torch.full((rows, context), float("-inf"), dtype=self._dtype).triu_(prefix + 1)
            if window is not None:
                at = torch.arange(prefix, prefix + rows)[:, None]
                found.masked_fill_(torch.arange(context) <= at - window, float("-inf"))
            self._masks[key] = found
        return found

    def _decode_mask(self, index: int, group: DecodeGroup, window: int) -> torch.Tensor:
        key = (-2 - index, window)
        found = self._masks.get(key)
        if found is None:
            places, lengths = torch.arange(group.context), group.lengths[:, None, None, None]
            found = torch.zeros(len(group.lengths), 1, 1, group.context, dtype=self._dtype)
            found.masked_fill_((places >= lengths) | (places < lengths - window), float("-inf"))
            self._masks[key] = found
        return found


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
