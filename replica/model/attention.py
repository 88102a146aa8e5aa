"""Attention over paged KV with torch's own kernels: padded batches for decode, one call per prefill chunk.

K and V are gathered block by block into a workspace. In decode the query heads that share a KV head become
its query rows, which keeps bf16 on the fast kernel. A chunk after a prefix is never given to ``is_causal``:
torch aligns that mask to the top left, which is wrong when queries are fewer than keys.

Query rows come in multiples of 4: with fewer, other kernels add in another order. When the plan pads contexts
too, a query's result is the same to the last bit whoever else is in the call.
"""

import torch
import torch.nn.functional as functional

from replica.model.paged_kv import PagedKv
from replica.model.step_plan import DecodeGroup, PrefillSpan, StepPlan

QUERY_ROWS = 4
"""Query rows are computed in multiples of this."""
SPARE_ROWS = 16
"""Rows of finite, otherwise meaningless values that must follow the tokens in queries, keys and values."""


class PagedAttention:
    """One step's attention: make it once per step, call it once per layer.

    A layer with a window of w lets a token attend to itself and the w - 1 tokens before it.
    """

    def __init__(self, plan: StepPlan, kv: PagedKv, heads: int, dtype: torch.dtype) -> None:
        """``heads``: query heads. ``dtype``: of queries, keys and values."""
        self._plan = plan
        self._kv = kv
        self._group = heads // kv.heads
        self._padded_group = _up(self._group, QUERY_ROWS)
        self._dtype = dtype
        self._masks: dict[tuple[int, int | None], torch.Tensor] = {}

    def __call__(
        self,
        layer: int,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        """Attend and write into ``out`` [tokens, heads * head_dim].

        ``queries`` [tokens + SPARE_ROWS, heads, head_dim]; ``keys`` and ``values`` [tokens + SPARE_ROWS,
        kv_heads, head_dim] are this step's, already stored in the paged memory.
        """
        for index, group in enumerate(self._plan.decodes):
            mask = group.mask if window is None else self._decode_mask(index, group, window)
            self._decode(layer, group, mask, queries, out)
        for index, span in enumerate(self._plan.prefills):
            self._prefill(layer, index, span, window, queries, keys, values, out)

    def _decode(
        self, layer: int, group: DecodeGroup, mask: torch.Tensor, queries: torch.Tensor, out: torch.Tensor
    ) -> None:
        rows, context = mask.shape[0], mask.shape[-1]
        kv, dim = self._kv, self._kv.head_dim
        keys, values = kv.gather(layer, group.blocks)
        folded = queries[group.first : group.stop].view(rows, kv.heads, self._group, dim)
        if self._padded_group != self._group:
            folded = functional.pad(folded, (0, 0, 0, self._padded_group - self._group))
        attended = functional.scaled_dot_product_attention(
            folded,
            keys.view(rows, context, kv.heads, dim).transpose(1, 2),
            values.view(rows, context, kv.heads, dim).transpose(1, 2),
            attn_mask=mask,
        )
        out[group.first : group.stop] = attended[:, :, : self._group].reshape(rows, -1)

    def _prefill(
        self,
        layer: int,
        index: int,
        span: PrefillSpan,
        window: int | None,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        out: torch.Tensor,
    ) -> None:
        rows = span.stop - span.first
        whole = span.blocks is None and (window is None or window >= rows)
        if span.blocks is None:
            # Rows past the chunk are junk that only junk queries see.
            stop = min(span.first + _up(rows, self._kv.block_size), queries.shape[0])
            keys, values = keys[span.first : stop], values[span.first : stop]
        else:
            keys, values = self._kv.gather(layer, span.blocks)
            keys, values = keys.flatten(0, 1), values.flatten(0, 1)
            stop = span.first + _up(rows, QUERY_ROWS)
        attended = functional.scaled_dot_product_attention(
            queries[span.first : stop].transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            attn_mask=None if whole else self._prefill_mask(index, span, stop, keys.shape[0], window),
            is_causal=whole,
            enable_gqa=True,
        )
        out[span.first : span.stop] = attended[0].transpose(0, 1)[:rows].reshape(rows, -1)

    def _prefill_mask(
        self, index: int, span: PrefillSpan, stop: int, context: int, window: int | None
    ) -> torch.Tensor:
        """[rows, context]: query row i, at position prefix + i, sees keys up to its own position."""
        found = self._masks.get((index, window))
        if found is None:
            rows = stop - span.first
            found = torch.full((rows, context), float("-inf"), dtype=self._dtype).triu_(span.prefix + 1)
            if window is not None:
                at = torch.arange(span.prefix, span.prefix + rows)[:, None]
                found.masked_fill_(torch.arange(context) <= at - window, float("-inf"))
            self._masks[index, window] = found
        return found

    def _decode_mask(self, index: int, group: DecodeGroup, window: int) -> torch.Tensor:
        found = self._masks.get((-1 - index, window))
        if found is None:
            visible = (group.mask == 0).sum(-1, keepdim=True)
            context = torch.arange(group.mask.shape[-1])
            found = group.mask.masked_fill(context < visible - window, float("-inf"))
            self._masks[-1 - index, window] = found
        return found


def _up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
