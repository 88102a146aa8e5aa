"""A prefill chunk's attention in bf16, made of matrix products.

Scores are rounded to bf16, as ``transformers`` has them. 489 queries after 512 keys take 8 ms a layer on one
core of a Zen 4, torch's fused kernel 17. Each head's keys and values lie side by side: oneDNN would copy them
otherwise. All memory, and all views of it, are made once a step: a short chunk waited for these as long as
for a quarter of its products.
"""

from dataclasses import dataclass

import torch

from replica.model.attention_masks import AttentionMasks
from replica.model.paged_kv import PagedKv
from replica.model.step_plan import PrefillSpan

ROWS_UNIT = 8
"""Two threads share a product of as many rows better: 315 take 0.41 ms, 320 0.37."""
QUERY_RUN = 128
"""Queries whose scores are computed together; they skip the keys after the last of them."""
TOGETHER_BYTES = 4 * 2**20
"""All heads' scores are computed at once where they take no more: few operations for a short chunk."""
KEPT_BYTES = 64 * 2**20
"""Memory for scores that is kept from step to step; what is larger is taken and given back."""


class ScoreMemory:
    """Memory for scores and for what softmax makes of them, the same in every step."""

    def __init__(self) -> None:
        self._kept = torch.empty(0, dtype=torch.bfloat16)

    def take(self, numbers: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Twice room for so many numbers, until the next call."""
        memory = self._kept
        if 2 * numbers > memory.shape[0]:
            memory = torch.empty(2 * numbers, dtype=torch.bfloat16)
            if memory.nbytes <= KEPT_BYTES:
                self._kept = memory
        return memory[:numbers], memory[numbers : 2 * numbers]


@dataclass(slots=True)
class _Product:
    """Some queries over some keys; all of it views, of one head (matrices) or of all (batches)."""

    queries: torch.Tensor
    keys: torch.Tensor
    scores: torch.Tensor
    masked: torch.Tensor
    """Those of the scores that a query may not see all of."""
    unseen: torch.Tensor
    shares: torch.Tensor
    values: torch.Tensor
    attended: torch.Tensor


class ChunkProducts:
    """One chunk of a step: made once, called for every layer."""

    def __init__(
        self,
        span: PrefillSpan,
        kv: PagedKv,
        heads: int,
        out: torch.Tensor,
        masks: AttentionMasks,
        memory: ScoreMemory,
    ) -> None:
        """``heads``: query heads. ``out`` [tokens or more, heads * head_dim], bf16: where results go."""
        rows, group, dim = span.stop - span.first, heads // kv.heads, kv.head_dim
        self._span = span
        self._masks = masks
        self._memory = memory
        self._rows, self._group = rows, group
        self._context = None if span.blocks is None else kv.context_by_head(span.blocks)
        # [2 * kv_heads, keys, head_dim]
        self._by_head = out.new_empty(2 * kv.heads, rows, dim)
        if self._context is not None:
            self._by_head = self._context.values
        self._keys, self._values = self._by_head.chunk(2)
        self._scale = dim**-0.5
        self._folded = (rows, kv.heads, group, dim)
        # [kv_heads, rows * group, head_dim]: the query heads that share a KV head become its query rows.
        padded = -(-rows * group // ROWS_UNIT) * ROWS_UNIT
        self._queries, self._attended = torch.zeros(2, kv.heads, padded, dim, dtype=out.dtype)
        self._queries_by_row, self._attended_by_row = (
            folded[:, : rows * group].view(kv.heads, rows, group, dim).transpose(0, 1)
            for folded in (self._queries, self._attended)
        )
        self._out = out[span.first : span.stop].view(self._folded)
        self._products: dict[int | None, list[_Product]] = {}

    def __call__(self, layer: int, window: int | None, queries: torch.Tensor, kv: torch.Tensor) -> None:
        """``queries`` and ``kv`` are the step's, as ``PagedAttention`` gets them."""
        span = self._span
        torch.mul(queries[span.first : span.stop].view(self._folded), self._scale, out=self._queries_by_row)
        if self._context is None:
            self._by_head.copy_(kv[span.first : span.stop].transpose(0, 1))
        else:
            self._context.load(layer)
        products = self._products.get(window)
        if products is None:
            products = self._products[window] = self._lay_out(window)
        multiply = torch.bmm if self._queries.dim() == products[0].queries.dim() else torch.mm
        for one in products:
            multiply(one.queries, one.keys, out=one.scores)
            one.masked.add_(one.unseen)
            torch.softmax(one.scores, -1, out=one.shares)
            multiply(one.shares, one.values, out=one.attended)
        self._out.copy_(self._attended_by_row)

    def _lay_out(self, window: int | None) -> list[_Product]:
        scores = self._queries.shape[0] * self._queries.shape[1] * self._keys.shape[1]
        if window is None and self._rows <= QUERY_RUN and 2 * scores <= TOGETHER_BYTES:
            return [self._together()]
        runs = range(0, self._rows, QUERY_RUN)
        return [self._run(head, first, window) for first in runs for head in range(self._queries.shape[0])]

    def _together(self) -> _Product:
        """All heads and keys at once; what follows the context in its last block is masked, too."""
        prefix, context = self._span.prefix, self._keys.shape[1]
        heads, padded, _ = self._queries.shape
        scores, shares = (
            room.view(heads, padded, context) for room in self._memory.take(heads * padded * context)
        )
        by_query = scores[:, : self._rows * self._group].view(heads, self._rows, self._group, context)
        unseen = self._masks.chunk(self._rows, context - prefix, 0, None)[:, None]
        return _Product(
            self._queries,
            self._keys.transpose(1, 2),
            scores,
            by_query[..., prefix:],
            unseen,
            shares,
            self._values,
            self._attended,
        )

    def _run(self, head: int, first: int, window: int | None) -> _Product:
        """A run of one head's queries, over the keys that some of them see."""
        stop = min(first + QUERY_RUN, self._rows)
        count, end = stop - first, self._span.prefix + stop
        if window is None:
            begin, unseen = 0, self._masks.chunk(count, count, 0, None)
        else:
            begin = max(0, end - count - window + 1)
            unseen = self._masks.chunk(count, end - begin, end - count - begin, window)
        keys = end - begin
        # The last run takes the padding along.
        at = slice(first * self._group, stop * self._group if stop < self._rows else self._queries.shape[1])
        rows = at.stop - at.start
        scores, shares = (room.view(rows, keys) for room in self._memory.take(rows * keys))
        by_query = scores[: count * self._group].view(count, self._group, keys)
        return _Product(
            self._queries[head, at],
            self._keys[head, begin:end].t(),
            scores,
            by_query[..., -unseen.shape[1] :],
            unseen[:, None],
            shares,
            self._values[head, begin:end],
            self._attended[head, at],
        )
