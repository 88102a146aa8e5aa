"""Gated linear attention: a layer that keeps one matrix per head instead of every token's K and V.

After token t the state is ``S_t = a_t S_(t-1) + k_t v_t^T`` and the output ``q_t^T S_t``, with a decay
``a_t`` in (0, 1) that the token itself sets (arXiv 2312.06635; Mamba-2 has the same form, arXiv 2405.21060).
States advance one token at a time, in fp32: they have the same bits however a prompt is cut into chunks.
"""

from collections.abc import Iterable

import torch

from replica.kv_cache.state_checkpoints import StateOrder, ZeroState
from replica.model.shape import ModelShape
from replica.model.step_plan import StateSpan

DECAY_SOFTNESS = 16.0
"""``a = sigmoid(x) ** (1 / 16)``: a state forgets over hundreds of tokens rather than over one or two."""


class StateMemory:
    """States of all recurrent layers in numbered slots: [slots, kv_heads, head_dim, head_dim] each, fp32."""

    def __init__(self, shape: ModelShape, slots: int) -> None:
        size = (slots, shape.kv_heads, shape.head_dim, shape.head_dim)
        self._states = {layer: torch.zeros(size) for layer in sorted(shape.recurrent)}
        self._advanced: list[tuple[int, torch.Tensor, torch.Tensor]] = []

    def carry_out(self, orders: Iterable[StateOrder]) -> None:
        """Clear and copy slots, in this order."""
        for order in orders:
            for states in self._states.values():
                if isinstance(order, ZeroState):
                    states[order.slot] = 0.0
                else:
                    states[order.target] = states[order.source]

    def read(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        """Copies of the states in ``slots``."""
        return self._states[layer][slots]

    def advance(self, layer: int, slots: torch.Tensor, states: torch.Tensor) -> None:
        """Keep what ``slots`` will hold once the whole step has succeeded."""
        self._advanced.append((layer, slots, states))

    def finish_step(self, *, succeeded: bool) -> None:
        """Write what was advanced, or forget it: a step that failed can be run again."""
        if succeeded:
            for layer, slots, states in self._advanced:
                self._states[layer][slots] = states
        self._advanced.clear()


class LinearAttention:
    """One step's recurrent layers: make it once per step, call it once per layer."""

    def __init__(self, spans: tuple[StateSpan, ...], memory: StateMemory, norm_eps: float) -> None:
        self._memory = memory
        self._norm_eps = norm_eps
        # Longest first, so that those which still have tokens are the first ones.
        ordered = sorted(spans, key=lambda span: span.first - span.stop)
        self._counts = [span.stop - span.first for span in ordered]
        self._firsts = torch.tensor([span.first for span in ordered], dtype=torch.int64)
        self._slots = torch.tensor([span.slot for span in ordered], dtype=torch.int64)

    def __call__(
        self, layer: int, queries: torch.Tensor, kv: torch.Tensor, decays: torch.Tensor, out: torch.Tensor
    ) -> None:
        """Advance every row's state and write into ``out`` [tokens, heads * head_dim], each head normed.

        ``queries`` [tokens or more, heads, head_dim], ``kv`` [tokens or more, 2 * kv_heads, head_dim],
        ``decays`` [tokens or more, kv_heads] before the sigmoid.
        """
        keys, values = kv.float().chunk(2, 1)
        kept = torch.sigmoid(decays.float()) ** (1 / DECAY_SOFTNESS)
        heads, dim = keys.shape[1:]
        folded = queries.float().view(queries.shape[0], heads, -1, dim)
        states = self._memory.read(layer, self._slots)
        active = len(self._counts)
        for step in range(self._counts[0]):
            while self._counts[active - 1] <= step:
                active -= 1
            at = self._firsts[:active] + step
            added = keys[at].unsqueeze(-1) * values[at].unsqueeze(-2)
            now = states[:active].mul_(kept[at][:, :, None, None]).add_(added)
            attended = (folded[at].unsqueeze(-1) * now.unsqueeze(2)).sum(-2)
            scale = (attended.square().mean(-1, keepdim=True) + self._norm_eps).rsqrt()
            out[at] = (attended * scale).flatten(1).to(out.dtype)
        self._memory.advance(layer, self._slots, states)
