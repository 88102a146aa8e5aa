"""The shape of a served model: what it has to read, multiply and keep, from its published sizes alone.

Everything a plan or a roofline needs follows from a handful of sizes in a model's ``config.json``: weights,
multiplications per token, KV bytes per token, bytes of recurrent state. Norms, biases and routers are left
out of the weights (below 0.2% of each model here).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts in place of one MLP; ``ModelShape.ffn`` is then the dense layers' width."""

    count: int
    active: int
    """Per token, shared ones not counted."""
    ffn: int
    """Width of one expert."""
    shared_ffn: int = 0
    """Width of what every token goes through beside its experts."""
    dense_layers: int = 0
    """Layers with an ordinary MLP."""

    def touched_share(self, tokens: int) -> float:
        """Of the experts those that any of ``tokens`` tokens is sent to, on average, if routing is even.

        >>> experts = Experts(count=128, active=8, ffn=768)
        >>> [round(experts.touched_share(tokens), 2) for tokens in (1, 16, 64)]
        [0.06, 0.64, 0.98]
        """
        return 1.0 - (1.0 - self.active / self.count) ** tokens


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """DeepSeek's MLA (arXiv 2405.04434): one compressed vector per token and layer stands for K and V."""

    kv_rank: int
    rope_dim: int
    q_rank: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """Layers that keep a state of fixed size per sequence in place of KV per token."""

    layers: int
    heads: int
    key_dim: int
    """State columns per head (Mamba's ``d_state``)."""
    value_dim: int
    """State rows per head."""
    conv_channels: int
    """Channels of the short convolution before the state."""
    conv_kernel: int
    projections: int
    """Weights of one such layer's projections, in and out."""
    state_bits: int = 32
    conv_bits: int = 16

    @property
    def layer_bytes(self) -> int:
        """Bytes one layer keeps for one sequence: the state, and the convolution's last inputs."""
        state = self.heads * self.key_dim * self.value_dim * self.state_bits
        conv = self.conv_channels * (self.conv_kernel - 1) * self.conv_bits
        return (state + conv) // 8


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A decoder's sizes. Layers are full attention unless counted in ``windowed_layers`` or ``state``.

    Llama 3.1 70B: 80 layers x K and V x 8 heads x 128 x 2 bytes:

    >>> llama = ModelShape("llama", "", 80, 8_192, 64, 8, 128, 28_672, 128_256)
    >>> llama.kv_bytes_per_token(), round(llama.weights / 1e9, 2)
    (327680.0, 70.55)
    >>> round(llama.flops_per_token / 1e9, 1)          # 2 per weight that multiplies
    136.9
    >>> llama.attention_flops(1)                       # 4 x 80 layers x 64 heads x 128
    2621440.0
    """

    name: str
    source: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    tied_embeddings: bool = False
    experts: Experts | None = None
    windowed_layers: int = 0
    window_tokens: int | None = None
    """What a windowed layer attends to and keeps."""
    latent: LatentAttention | None = None
    state: RecurrentState | None = None
    attention_gate: bool = False
    """The query projection also makes a gate of the same width (Qwen3-Next)."""

    @property
    def state_layers(self) -> int:
        """Layers with a recurrent state."""
        return self.state.layers if self.state else 0

    @property
    def full_layers(self) -> int:
        """Layers whose KV grows with every token."""
        return self.layers - self.windowed_layers - self.state_layers

    # Weights

    @property
    def attention_layer_weights(self) -> int:
        """Weights of one attention layer's projections."""
        if self.latent is not None:
            mla, heads = self.latent, self.heads
            query = self.hidden * mla.q_rank + mla.q_rank * heads * (mla.nope_dim + mla.rope_dim)
            keys = self.hidden * (mla.kv_rank + mla.rope_dim)
            keys += mla.kv_rank * heads * (mla.nope_dim + mla.value_dim)
            return query + keys + heads * mla.value_dim * self.hidden
        queries = self.heads * (3 if self.attention_gate else 2)  # query, (gate,) output
        return self.hidden * self.head_dim * (queries + 2 * self.kv_heads)

    @property
    def _attention_weights(self) -> int:
        weights = (self.layers - self.state_layers) * self.attention_layer_weights
        return weights + (self.state.layers * self.state.projections if self.state else 0)

    @property
    def _always_read_mlp_weights(self) -> int:
        """MLP weights that every token goes through."""
        if self.experts is None:
            return self.layers * 3 * self.hidden * self.ffn
        moe_layers = self.layers - self.experts.dense_layers
        dense = self.experts.dense_layers * self.ffn + moe_layers * self.experts.shared_ffn
        return 3 * self.hidden * dense

    @property
    def expert_weights(self) -> int:
        """Weights of all routed experts together; 0 for a dense model."""
        if self.experts is None:
            return 0
        moe_layers = self.layers - self.experts.dense_layers
        return moe_layers * self.experts.count * 3 * self.hidden * self.experts.ffn

    @property
    def linear_weights(self) -> int:
        """All weights that quantization shrinks: projections, MLPs, experts."""
        return self._attention_weights + self._always_read_mlp_weights + self.expert_weights

    @property
    def embedding_weights(self) -> int:
        """The embedding and, unless it is the same table, the output layer."""
        return self.vocab * self.hidden * (1 if self.tied_embeddings else 2)

    @property
    def weights(self) -> int:
        """All of them."""
        return self.linear_weights + self.embedding_weights

    @property
    def active_linear_weights(self) -> int:
        """Of ``linear_weights``, those one token is multiplied with."""
        return self._attention_weights + self._always_read_mlp_weights + self.active_expert_weights

    @property
    def active_expert_weights(self) -> int:
        """Of ``expert_weights``, those one token is multiplied with."""
        return 0 if self.experts is None else self.expert_weights * self.experts.active // self.experts.count

    def weight_bytes(self, linear_bits: float, embedding_bits: float = 16.0) -> float:
        """Bytes of the whole model in memory."""
        return (self.linear_weights * linear_bits + self.embedding_weights * embedding_bits) / 8.0

    # Math

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of one token's projections and MLPs; a prompt's tokens need no logits
        but the last, so the output layer is not in it."""
        return 2.0 * self.active_linear_weights

    @property
    def logits_flops(self) -> float:
        """The output layer, once per token that is sampled."""
        return 2.0 * self.vocab * self.hidden

    @property
    def attention_layer_flops(self) -> float:
        """Of one token, one layer and one token attended to.

        ``2 * head_dim`` a head for the score and as much for the weighted value.
        """
        width = float(self.head_dim)
        if self.latent is not None:
            width = (self.latent.nope_dim + self.latent.rope_dim + self.latent.value_dim) / 2.0
        return 4.0 * self.heads * width

    def attention_flops(self, context_tokens: float) -> float:
        """Scores and weighted values of one token that attends to ``context_tokens`` tokens."""
        seen = self.full_layers * context_tokens
        if self.window_tokens is not None:
            seen += self.windowed_layers * min(context_tokens, self.window_tokens)
        flops = self.attention_layer_flops * seen
        if self.state is not None:  # decay, update and read of the state: about 3 multiply-adds an element
            state = self.state
            flops += 6.0 * state.layers * state.heads * state.key_dim * state.value_dim
        return flops

    # Memory

    @property
    def kv_elements_per_layer_token(self) -> int:
        """K and V elements that one attention layer keeps per token."""
        if self.latent is not None:
            return self.latent.kv_rank + self.latent.rope_dim
        return 2 * self.kv_heads * self.head_dim

    def kv_bytes_per_token(self, kv_bits: float = 16.0) -> float:
        """Bytes by which the KV of a long sequence grows per token: full-attention layers only."""
        return self.full_layers * self.kv_elements_per_layer_token * kv_bits / 8.0

    def kv_bytes(self, tokens: int, kv_bits: float = 16.0) -> float:
        """Bytes of KV and state of a sequence of ``tokens`` tokens, windows cut."""
        kept = self.full_layers * tokens
        if self.window_tokens is not None:
            kept += self.windowed_layers * min(tokens, self.window_tokens)
        return kept * self.kv_elements_per_layer_token * kv_bits / 8.0 + self.state_bytes

    @property
    def state_bytes(self) -> int:
        """Bytes of recurrent state of one sequence, however long; also of one checkpoint of it."""
        return self.state.layers * self.state.layer_bytes if self.state else 0
