"""The forward pass of a decoder-only transformer over one step's tokens."""

import torch
import torch.nn.functional as functional

from replica.model.attention import SPARE_ROWS, PagedAttention
from replica.model.matmul import INVARIANT_ROWS, MOST_COLUMNS, padded_rows, product
from replica.model.paged_kv import PagedKv
from replica.model.shape import ModelShape, inverse_frequencies
from replica.model.step_plan import StepPlan
from replica.model.weights import LayerWeights, Weights


class Decoder:
    """Llama and its kin: RMS norm, rotary embedding, grouped-query attention, SwiGLU.

    ``forward`` computes all tokens of a step, stores their K and V, and returns logits where a row samples.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        kv: PagedKv,
        max_tokens: int,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """``max_tokens``: the most tokens a step may have; buffers for the largest products are kept.

        ``batch_invariant``: a token's logits have the same bits whatever else is in its step; otherwise
        they may differ in the last one or two, as products of few rows take other kernels.
        """
        self.shape = shape
        self.kv = kv
        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._least_rows = INVARIANT_ROWS if batch_invariant else 1
        angles = torch.outer(
            torch.arange(shape.context, dtype=torch.float32),
            torch.tensor(inverse_frequencies(shape.rotary, shape.head_dim), dtype=torch.float32),
        )
        self._turns = torch.polar(torch.ones_like(angles), angles)
        qkv_rows = (shape.heads + 2 * shape.kv_heads) * shape.head_dim
        rows = max(max_tokens, MOST_COLUMNS)
        self._qkv = torch.zeros(rows + SPARE_ROWS, qkv_rows, dtype=self._dtype)
        self._gate_up = torch.empty(rows * 2 * shape.ffn, dtype=self._dtype)

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[torch.Tensor, bool]:
        """Logits [samples, vocab], fp32, in the order of ``plan.works``; and whether all numbers were finite.

        What is not finite stays in the row it arose in: keys and values are stored as zero instead.
        """
        shape = self.shape
        tokens = plan.tokens.shape[0]
        rows = padded_rows(tokens, self._least_rows)
        hidden = torch.zeros(rows, shape.hidden, dtype=self._dtype)
        torch.index_select(self._weights.embedding, 0, plan.tokens, out=hidden[:tokens])
        attended = torch.zeros(rows, shape.heads * shape.head_dim, dtype=self._dtype)
        turns = self._turns.index_select(0, plan.positions)[:, None]
        attend = PagedAttention(plan, self.kv, shape.heads, self._dtype)
        for number, layer in enumerate(self._weights.layers):
            queries, keys, values = self._queries_keys_values(layer, hidden, tokens, turns)
            self.kv.store(number, plan.slots, keys[:tokens], values[:tokens])
            attend(number, shape.windows[number], queries, keys, values, attended[:tokens])
            hidden += product(layer.output, attended)
            if layer.output_bias is not None:
                hidden += layer.output_bias
            self._feed_forward(layer, hidden)
        return self._logits(hidden, plan.sampled), bool(hidden[:tokens].sum().isfinite())

    def _queries_keys_values(
        self, layer: LayerWeights, hidden: torch.Tensor, tokens: int, turns: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[tokens + SPARE_ROWS, heads, head_dim] each, the tokens' normed and rotated."""
        shape = self.shape
        normed = self._norm(hidden, layer.attention_norm)
        qkv = self._qkv[: hidden.shape[0]]
        if hidden.shape[0] <= MOST_COLUMNS:
            qkv.copy_(product(layer.qkv, normed))
        else:
            torch.mm(normed, layer.qkv.t(), out=qkv)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        by_head = self._qkv[: tokens + SPARE_ROWS].view(tokens + SPARE_ROWS, -1, shape.head_dim)
        rotated = by_head[:tokens, : shape.heads + shape.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            rotated[:, : shape.heads] = self._norm(rotated[:, : shape.heads], layer.q_norm)
            rotated[:, shape.heads :] = self._norm(rotated[:, shape.heads :], layer.k_norm)
        if self._dtype == torch.float32:
            torch.view_as_complex(rotated.view(tokens, -1, shape.head_dim // 2, 2)).mul_(turns)
        else:
            pairs = rotated.float().view(tokens, -1, shape.head_dim // 2, 2)
            rotated.copy_(torch.view_as_real(torch.view_as_complex(pairs) * turns).flatten(-2))
        # A masked key must be finite too, or the query that does not see it becomes NaN.
        by_head[:tokens, shape.heads :].nan_to_num_(0.0, 0.0, 0.0)
        return (
            by_head[:, : shape.heads],
            by_head[:, shape.heads : shape.heads + shape.kv_heads],
            by_head[:, shape.heads + shape.kv_heads :],
        )

    def _feed_forward(self, layer: LayerWeights, hidden: torch.Tensor) -> None:
        normed = self._norm(hidden, layer.ffn_norm)
        rows, ffn = hidden.shape[0], self.shape.ffn
        if rows <= MOST_COLUMNS:
            columns = self._gate_up[: 2 * ffn * rows].view(2 * ffn, rows)
            torch.mm(layer.gate_up, normed.t(), out=columns)
            gated = functional.silu(columns[:ffn], inplace=True).mul_(columns[ffn:])
            hidden += torch.mm(layer.down, gated).t()
        else:
            both = self._gate_up[: rows * 2 * ffn].view(rows, 2 * ffn)
            torch.mm(normed, layer.gate_up.t(), out=both)
            gated = functional.silu(both[:, :ffn], inplace=True).mul_(both[:, ffn:])
            # Not addmm_: it adds the residual in another order than the few-rows route above.
            hidden += torch.mm(gated, layer.down.t())

    def _logits(self, hidden: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        samples = sampled.shape[0]
        if samples == 0:
            return torch.empty(0, self.shape.vocab)
        chosen = torch.zeros(padded_rows(samples, self._least_rows), self.shape.hidden, dtype=self._dtype)
        torch.index_select(hidden, 0, sampled, out=chosen[:samples])
        logits = product(self._weights.head, self._norm(chosen, self._weights.norm))[:samples]
        return logits.float().contiguous()

    def _norm(self, values: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return functional.rms_norm(values, (values.shape[-1],), weight, self.shape.norm_eps)
