"""The forward pass of a decoder-only transformer over one step's tokens."""

from dataclasses import replace

import torch
import torch.nn.functional as functional

from replica.model.attention import SPARE_ROWS, AttentionMemory, PagedAttention
from replica.model.linear_attention import LinearAttention, StateMemory
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
        states: StateMemory | None = None,
        *,
        batch_invariant: bool = False,
    ) -> None:
        """``states``: of the recurrent layers, if there are any.

        ``batch_invariant``: a token's logits have the same bits whatever else is in its step; otherwise
        they may differ in the last ones, as attention over few queries or keys adds in another order.
        """
        self.shape = shape
        self.kv = kv
        self._states = states
        self._weights = weights
        self._dtype = weights.embedding.dtype
        self._batch_invariant = batch_invariant
        self._attention_memory = AttentionMemory()
        angles = torch.outer(
            torch.arange(shape.context, dtype=torch.float32),
            torch.tensor(inverse_frequencies(shape.rotary, shape.head_dim), dtype=torch.float32),
        )
        self._turns = torch.polar(torch.ones_like(angles), angles)
        self._norm_eps = torch.tensor(shape.norm_eps)
        # Two types in one operation take longer.
        self._norms = [(layer.attention_norm.float(), layer.ffn_norm.float()) for layer in weights.layers]

    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> tuple[torch.Tensor, bool]:
        """Logits [samples, vocab], fp32, in the order of ``plan.works``; and whether all numbers were finite.

        What is not finite stays in the row it arose in: keys and values are stored as zero instead.
        """
        shape = self.shape
        tokens = plan.tokens.shape[0]
        rows = tokens + SPARE_ROWS if self._batch_invariant else tokens
        hidden = torch.zeros(rows, shape.hidden)
        hidden[:tokens] = self._weights.embedding.index_select(0, plan.tokens)
        attended = torch.zeros(rows, shape.heads * shape.head_dim, dtype=self._dtype)
        exact = torch.empty_like(hidden)
        room: tuple[torch.Tensor, torch.Tensor] | None
        room = (exact, exact if self._dtype == torch.float32 else torch.empty_like(hidden, dtype=self._dtype))
        turns = self._turns.index_select(0, plan.positions)[:, None]
        attend = self._attention(plan, attended)
        rotate = _Rotation(turns, shape, self._dtype)
        stored = self.kv.rows(plan.slots)
        recur = None
        if self._states is not None:
            recur = LinearAttention(plan.states, self._states, shape.norm_eps)
        finite = True
        last_layer = None if self._weights.layers[-1].decay is not None else plan.last_layer
        for number, layer in enumerate(self._weights.layers):
            attention_norm, ffn_norm = self._norms[number]
            normed = self._norm(hidden, attention_norm, room)
            queries, kv = self._queries_keys_values(layer, normed, tokens, rotate)
            if layer.decay is not None and recur is not None:
                recur(number, queries, kv, layer.decay(normed), attended[:tokens])
            else:
                self.kv.store(number, stored, kv[:tokens])
                if last_layer is not None and number == shape.layers - 1:
                    finite = bool(hidden.sum().isfinite())
                    hidden, queries = (rows.index_select(0, plan.sampled) for rows in (hidden, queries))
                    if not plan.works:
                        break
                    attended, room = attended.new_empty(hidden.shape[0], attended.shape[1]), None
                    attend = self._attention(replace(plan, decodes=last_layer, prefills=()), attended)
                attend(number, shape.windows[number], queries, kv)
            hidden += layer.output(attended)
            if layer.output_bias is not None:
                hidden += layer.output_bias
            gate, up = layer.gate_up(self._norm(hidden, ffn_norm, room)).chunk(2, 1)
            # Not in place: the halves of gate_up lie apart, and the product would copy them together again.
            hidden += layer.down(functional.silu(gate).mul_(up))
        finite = finite and bool(hidden[:tokens].sum().isfinite())
        chosen = hidden if last_layer is not None else hidden.index_select(0, plan.sampled)
        return self._logits(chosen), finite

    def _attention(self, plan: StepPlan, attended: torch.Tensor) -> PagedAttention:
        return PagedAttention(
            plan,
            self.kv,
            self.shape.heads,
            attended,
            self._attention_memory,
            batch_invariant=self._batch_invariant,
        )

    def _queries_keys_values(
        self, layer: LayerWeights, normed: torch.Tensor, tokens: int, rotate: "_Rotation"
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """[rows, heads, head_dim] and [rows, 2 * kv_heads, head_dim], the tokens' normed and rotated."""
        shape = self.shape
        qkv = layer.qkv(normed)
        if layer.qkv_bias is not None:
            qkv += layer.qkv_bias
        by_head = qkv.view(qkv.shape[0], -1, shape.head_dim)
        rotated = by_head[:tokens, : shape.heads + shape.kv_heads]
        if layer.q_norm is not None and layer.k_norm is not None:
            rotated[:, : shape.heads] = self._norm(rotated[:, : shape.heads], layer.q_norm)
            rotated[:, shape.heads :] = self._norm(rotated[:, shape.heads :], layer.k_norm)
        rotate(rotated)
        kv = by_head[:, shape.heads :]
        # A masked key must be finite too, or the query that does not see it becomes NaN.
        kv[:tokens].nan_to_num_(0.0, 0.0, 0.0)
        return by_head[:, : shape.heads], kv

    def _logits(self, chosen: torch.Tensor) -> torch.Tensor:
        """Of ``chosen`` [samples, hidden]."""
        samples = chosen.shape[0]
        if samples == 0:
            return torch.empty(0, self.shape.vocab)
        if self._batch_invariant:
            chosen = functional.pad(chosen, (0, 0, 0, SPARE_ROWS))
        logits = self._weights.head(self._norm(chosen, self._weights.norm))[:samples]
        return logits.float().contiguous()

    def _norm(
        self,
        values: torch.Tensor,
        weight: torch.Tensor,
        room: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """``values`` over their root mean square, times ``weight``, in the weights' type.

        ``room``: memory for the result, in fp32 and in that type; else it is fresh.
        """
        length = torch.linalg.vector_norm(values, dim=-1, keepdim=True, dtype=torch.float32)
        scale = torch.addcmul(self._norm_eps, length, length, value=1 / values.shape[-1]).rsqrt_()
        if room is None:
            return (values * scale).mul_(weight).to(self._dtype)
        return room[1].copy_(torch.mul(values, scale, out=room[0]).mul_(weight))


class _Rotation:
    """Rotates one step's queries and keys by their positions, in fp32."""

    def __init__(self, turns: torch.Tensor, shape: ModelShape, dtype: torch.dtype) -> None:
        """``turns`` [tokens, 1, head_dim / 2], complex; ``dtype``: of queries and keys."""
        self._turns = turns
        self._pairs = (turns.shape[0], shape.heads + shape.kv_heads, shape.head_dim // 2, 2)
        self._exact: torch.Tensor | None = None
        if dtype != torch.float32:
            self._exact = torch.empty(*self._pairs[:2], shape.head_dim)
            self._complex = torch.view_as_complex(self._exact.view(self._pairs))

    def __call__(self, rows: torch.Tensor) -> None:
        """Rotate ``rows`` [tokens, heads + kv_heads, head_dim] in place."""
        if self._exact is None:
            torch.view_as_complex(rows.view(self._pairs)).mul_(self._turns)
        else:
            self._exact.copy_(rows)
            self._complex.mul_(self._turns)
            rows.copy_(self._exact)
