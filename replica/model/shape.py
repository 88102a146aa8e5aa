"""The shape of a decoder-only model: sizes, norms, rotary embedding, attention windows; no tensors.

Two sources fill it in: the ``config.json`` of a Hugging Face folder and the metadata of a GGUF file.
What this engine cannot compute is refused here, at start, by name.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


class ModelError(ValueError):
    """The model cannot be loaded: which file or key, what was expected, what to do."""


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """Llama 3.1's stretching of the low rotary frequencies (arXiv 2407.21783, section 3.4)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context: int


@dataclass(frozen=True, slots=True)
class Rotary:
    """Rotary position embedding: base, and how its frequencies are scaled."""

    theta: float
    linear_factor: float = 1.0
    llama3: Llama3Scaling | None = None
    divisors: tuple[float, ...] = ()
    """Of each rotated pair's frequency, fastest first: how a GGUF writes Llama 3 scaling. Empty: none."""


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Everything about a model that is not a weight."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    context: int
    """Tokens a sequence may have, prompt and output together."""
    norm_eps: float
    rotary: Rotary
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    tied_embeddings: bool
    windows: tuple[int | None, ...]
    """Per layer: a token attends to this many tokens, itself included; ``None`` is all."""
    recurrent: frozenset[int] = frozenset()
    """Layers of gated linear attention: they keep a state per sequence and no K and V per token."""

    def __post_init__(self) -> None:
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads do not divide into {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise ModelError(f"head size {self.head_dim} is odd; rotary embedding needs pairs")
        if len(self.windows) != self.layers:
            raise ModelError(f"{len(self.windows)} attention windows for {self.layers} layers")


def shape_from_hf(config: Mapping[str, Any]) -> ModelShape:
    """Read a Hugging Face ``config.json``.

    Raises:
        ModelError: the family or a scaling rule is not supported, or a key is missing.
    """
    family = config.get("model_type")
    if family not in SUPPORTED_MODEL_TYPES:
        raise ModelError(
            f"config.json: model_type is {family!r}; supported are {', '.join(SUPPORTED_MODEL_TYPES)}"
        )
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        raise ModelError(f"config.json: hidden_act is {activation!r}; only 'silu' is supported")
    try:
        heads = int(config["num_attention_heads"])
        hidden = int(config["hidden_size"])
        layers = int(config["num_hidden_layers"])
        attention_bias = bool(config.get("attention_bias", False))
        return ModelShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=int(config.get("head_dim") or hidden // heads),
            ffn=int(config["intermediate_size"]),
            vocab=int(config["vocab_size"]),
            context=int(config["max_position_embeddings"]),
            norm_eps=float(config["rms_norm_eps"]),
            rotary=_rotary_from_hf(config),
            qkv_bias=attention_bias or family == "qwen2",
            output_bias=attention_bias and family != "qwen2",
            qk_norm=family == "qwen3",
            tied_embeddings=bool(config.get("tie_word_embeddings", False)),
            windows=_windows_from_hf(config, family, layers),
        )
    except KeyError as missing:
        raise ModelError(f"config.json: the key {missing} is missing") from missing


def _rotary_from_hf(config: Mapping[str, Any]) -> Rotary:
    # transformers 5 writes everything into rope_parameters, earlier ones rope_theta and rope_scaling.
    parameters = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = parameters.get("rope_type") or parameters.get("type") or "default"
    if float(parameters.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("config.json: partial_rotary_factor below 1 is not supported")
    if kind == "default":
        return Rotary(theta)
    if kind == "linear":
        return Rotary(theta, linear_factor=float(parameters["factor"]))
    if kind == "llama3":
        return Rotary(
            theta,
            llama3=Llama3Scaling(
                factor=float(parameters["factor"]),
                low_freq_factor=float(parameters["low_freq_factor"]),
                high_freq_factor=float(parameters["high_freq_factor"]),
                original_context=int(parameters["original_max_position_embeddings"]),
            ),
        )
    raise ModelError(f"config.json: rope type {kind!r}; supported are default, linear, llama3")


def _windows_from_hf(config: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    window = config.get("sliding_window")
    if family in ("qwen2", "qwen3") and not config.get("use_sliding_window", False):
        window = None
    if window is None or family == "llama":
        return (None,) * layers
    kinds = config.get("layer_types")
    if kinds:
        return tuple(int(window) if kind == "sliding_attention" else None for kind in kinds)
    first = int(config.get("max_window_layers", 0)) if family in ("qwen2", "qwen3") else 0
    return tuple(int(window) if layer >= first else None for layer in range(layers))


def shape_from_gguf(
    metadata: Mapping[str, Any], tensors: frozenset[str], rope_divisors: Sequence[float] = ()
) -> ModelShape:
    """Read the metadata of a GGUF file; ``tensors`` are the names of the tensors in it.

    ``rope_divisors``: its ``rope_freqs.weight``, if it has one.

    Raises:
        ModelError: the architecture or a scaling rule is not supported, or a key is missing.
    """
    arch = metadata.get("general.architecture")
    if arch not in ("llama", "qwen2", "qwen3"):
        raise ModelError(f"GGUF: architecture is {arch!r}; supported are llama, qwen2, qwen3")
    try:
        heads = int(metadata[f"{arch}.attention.head_count"])
        hidden = int(metadata[f"{arch}.embedding_length"])
        layers = int(metadata[f"{arch}.block_count"])
        head_dim = int(metadata.get(f"{arch}.attention.key_length", hidden // heads))
        if len(rope_divisors) not in (0, head_dim // 2) or any(one <= 0 for one in rope_divisors):
            raise ModelError(
                f"GGUF: rope_freqs.weight: expected {head_dim // 2} numbers above 0, one per rotated pair"
            )
        scaling = metadata.get(f"{arch}.rope.scaling.type", "none")
        if scaling not in ("none", "linear"):
            raise ModelError(f"GGUF: rope scaling {scaling!r}; supported are none and linear")
        if int(metadata.get(f"{arch}.rope.dimension_count", head_dim)) != head_dim:
            raise ModelError("GGUF: rotary embedding over a part of the head is not supported")
        if metadata.get(f"{arch}.expert_count"):
            raise ModelError("GGUF: mixture-of-experts models are not supported")
        linear_factor = float(metadata[f"{arch}.rope.scaling.factor"]) if scaling == "linear" else 1.0
        window = metadata.get(f"{arch}.attention.sliding_window")
        return ModelShape(
            layers=layers,
            hidden=hidden,
            heads=heads,
            kv_heads=int(metadata.get(f"{arch}.attention.head_count_kv", heads)),
            head_dim=head_dim,
            ffn=int(metadata[f"{arch}.feed_forward_length"]),
            vocab=int(metadata.get(f"{arch}.vocab_size", len(metadata["tokenizer.ggml.tokens"]))),
            context=int(metadata[f"{arch}.context_length"]),
            norm_eps=float(metadata[f"{arch}.attention.layer_norm_rms_epsilon"]),
            rotary=Rotary(
                float(metadata.get(f"{arch}.rope.freq_base", 10_000.0)),
                linear_factor=linear_factor,
                divisors=tuple(rope_divisors),
            ),
            qkv_bias="blk.0.attn_q.bias" in tensors,
            output_bias="blk.0.attn_output.bias" in tensors,
            qk_norm="blk.0.attn_q_norm.weight" in tensors,
            tied_embeddings="output.weight" not in tensors,
            windows=(int(window) if window else None,) * layers,
        )
    except KeyError as missing:
        raise ModelError(f"GGUF: the key {missing} is missing") from missing


def inverse_frequencies(rotary: Rotary, head_dim: int) -> list[float]:
    """Radians per token for each of the ``head_dim / 2`` rotated pairs, fastest first.

    Llama 3 scaling divides the slow ones by ``factor``, keeps the fast ones, and blends between:

    >>> plain = inverse_frequencies(Rotary(10_000.0), 8)
    >>> [round(f, 4) for f in plain]
    [1.0, 0.1, 0.01, 0.001]
    >>> scaled = inverse_frequencies(Rotary(10_000.0, llama3=Llama3Scaling(8.0, 1.0, 4.0, 1024)), 8)
    >>> [round(f, 5) for f in scaled]                      # wavelengths 6, 63, 628, 6283 tokens
    [1.0, 0.1, 0.00309, 0.00013]
    """
    plain = [rotary.theta ** (-2 * i / head_dim) / rotary.linear_factor for i in range(head_dim // 2)]
    if rotary.divisors:
        plain = [frequency / divisor for frequency, divisor in zip(plain, rotary.divisors, strict=True)]
    rule = rotary.llama3
    if rule is None:
        return plain
    scaled = []
    for frequency in plain:
        wavelength = 2 * math.pi / frequency
        if wavelength < rule.original_context / rule.high_freq_factor:
            scaled.append(frequency)
        elif wavelength > rule.original_context / rule.low_freq_factor:
            scaled.append(frequency / rule.factor)
        else:
            smooth = (rule.original_context / wavelength - rule.low_freq_factor) / (
                rule.high_freq_factor - rule.low_freq_factor
            )
            scaled.append((1 - smooth) * frequency / rule.factor + smooth * frequency)
    return scaled
