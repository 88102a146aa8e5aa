"""A prefill chunk's attention in bf16, made of matrix products.

Scores are rounded to bf16, as ``transformers`` has them. 489 queries after 512 keys take 8 ms a layer on one
core of a Zen 4, torch's fused kernel 17. Each head's keys and values lie side by side: oneDNN would copy them
otherwise.
"""

import torch

from replica.model.attention_masks import AttentionMasks
from replica.model.paged_kv import PagedKv
from replica.model.step_plan import PrefillSpan

ROWS_UNIT = 8
"""Two threads share a product of as many rows better: 315 take 0.41 ms, 320 0.37."""
QUERY_RUN = 128
"""Queries whose scores are computed together; they skip the keys after the last of them."""


class ChunkProducts:
    """One chunk of a step: made once, called for every layer."""

    def __init__(
        self, span: PrefillSpan, kv: PagedKv, heads: int, out: torch.Tensor, masks: AttentionMasks
    ) -> None:
        """``heads``: query heads. ``out`` [tokens or more, heads * head_dim], bf16: where results go."""
        rows, group, dim = span.stop - span.first, heads // kv.heads, kv.head_dim
        self._span = span
        self._masks = masks
        self._rows, self._group = rows, group
        self._context = None if span.blocks is None else kv.context_by_head(span.blocks)
        self._scale = dim**-0.5
        self._folded = (rows, kv.heads, group, dim)
        # [kv_heads, rows * group, head_dim]: the query heads that share a KV head become its query rows.
        padded = -(-rows * group // ROWS_UNIT) * ROWS_UNIT
        self._queries, self._attended = torch.zeros(2, kv.heads, padded, dim, dtype=out.dtype)
        self._queries_by_row, self._attended_by_row = (
            self._by_row(folded).transpose(0, 1) for folded in (self._queries, self._attended)
        )
        self._out = out[span.first : span.stop].view(self._folded)

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        """``queries`` and ``kv`` are the step's, as ``PagedAttention`` gets them."""
        span = self._span
        torch.mul(queries[span.first : span.stop].view(self._folded), self._scale, out=self._queries_by_row)
        if self._context is None:
            context = kv[span.first : span.stop].transpose(0, 1).contiguous()
        else:
            self._context.load(layer)
            context = self._context.values
        keys, values = context.chunk(2)
        if window is None and self._rows <= QUERY_RUN:
            self._together(keys, values)
        else:
            for first in range(0, self._rows, QUERY_RUN):
                self._run(first, window, keys, values)
        self._out.copy_(self._attended_by_row)

    def _together(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """All heads and keys at once; what follows the context in its last block is masked, too."""
        prefix, context = self._span.prefix, keys.shape[1]
        scores = torch.bmm(self._queries, keys.transpose(1, 2))
        unseen = self._masks.chunk(self._rows, context - prefix, 0, None)
        self._by_row(scores)[..., prefix:] += unseen[:, None]
        torch.bmm(scores.softmax(-1), values, out=self._attended)

    def _by_row(self, folded: torch.Tensor) -> torch.Tensor:
        """[kv_heads, rows * group or more, n] as [kv_heads, rows, group, n]."""
        heads, _, numbers = folded.shape
        return folded[:, : self._rows * self._group].view(heads, self._rows, self._group, numbers)

    def _run(self, first: int, window: int | None, keys: torch.Tensor, values: torch.Tensor) -> None:
        """A run of queries, one KV head after the other, over the keys that some of them see."""
        stop = min(first + QUERY_RUN, self._rows)
        count, end = stop - first, self._span.prefix + stop
        if window is None:
            begin, unseen = 0, self._masks.chunk(count, count, 0, None)
        else:
            begin = max(0, end - count - window + 1)
            unseen = self._masks.chunk(count, end - begin, end - count - begin, window)
        at = slice(first * self._group, stop * self._group)
        for head in range(keys.shape[0]):
            scores = torch.mm(self._queries[head, at], keys[head, begin:end].t())
            by_query = scores.view(count, self._group, end - begin)
            by_query[..., -unseen.shape[1] :] += unseen[:, None]
            torch.mm(scores.softmax(-1), values[head, begin:end], out=self._attended[head, at])
