"""The weights as the decoder wants them: Q, K and V in one matrix, gate and up too, rotary pairs adjacent."""

from dataclasses import dataclass
from typing import Protocol

import torch

from replica.model.matrix import Matrix, matrix
from replica.model.shape import ModelError, ModelShape


class TensorSource(Protocol):
    """Where weights come from: tensors under their Hugging Face names and in their layout."""

    def tensor(self, name: str, /) -> torch.Tensor:
        """The tensor of this name; ModelError when there is none."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer. The outputs of ``qkv`` are Q heads, K heads, V heads."""

    attention_norm: torch.Tensor
    qkv: Matrix
    qkv_bias: torch.Tensor | None
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: Matrix
    output_bias: torch.Tensor | None
    ffn_norm: torch.Tensor
    gate_up: Matrix
    down: Matrix


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model; ``head`` is made of the embedding when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix


def assemble(source: TensorSource, shape: ModelShape, dtype: torch.dtype) -> Weights:
    """Read every weight from ``source`` and lay it out for the decoder.

    Raises:
        ModelError: a tensor is missing or has another shape than ``shape`` says.
    """

    def read(name: str, *expected: int) -> torch.Tensor:
        values = source.tensor(name)
        if tuple(values.shape) != expected:
            raise ModelError(f"tensor {name!r} has shape {tuple(values.shape)}, expected {expected}")
        return values.to(dtype)

    def layer(number: int) -> LayerWeights:
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        q_rows, kv_rows = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim

        def rotated(kind: str, rows: int, heads: int, *columns: int) -> torch.Tensor:
            return pairs_adjacent(read(f"{attention}.{kind}", rows, *columns), heads)

        qkv_bias = q_norm = k_norm = output_bias = None
        if shape.qkv_bias:
            qkv_bias = torch.cat(
                [
                    rotated("q_proj.bias", q_rows, shape.heads),
                    rotated("k_proj.bias", kv_rows, shape.kv_heads),
                    read(f"{attention}.v_proj.bias", kv_rows),
                ]
            )
        if shape.output_bias:
            output_bias = read(f"{attention}.o_proj.bias", shape.hidden)
        if shape.qk_norm:
            q_norm = rotated("q_norm.weight", shape.head_dim, 1)
            k_norm = rotated("k_norm.weight", shape.head_dim, 1)
        return LayerWeights(
            attention_norm=read(f"{prefix}.input_layernorm.weight", shape.hidden),
            qkv=matrix(
                torch.cat(
                    [
                        rotated("q_proj.weight", q_rows, shape.heads, shape.hidden),
                        rotated("k_proj.weight", kv_rows, shape.kv_heads, shape.hidden),
                        read(f"{attention}.v_proj.weight", kv_rows, shape.hidden),
                    ]
                )
            ),
            qkv_bias=qkv_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            output=matrix(read(f"{attention}.o_proj.weight", shape.hidden, q_rows)),
            output_bias=output_bias,
            ffn_norm=read(f"{prefix}.post_attention_layernorm.weight", shape.hidden),
            gate_up=matrix(
                torch.cat(
                    [
                        read(f"{prefix}.mlp.gate_proj.weight", shape.ffn, shape.hidden),
                        read(f"{prefix}.mlp.up_proj.weight", shape.ffn, shape.hidden),
                    ]
                )
            ),
            down=matrix(read(f"{prefix}.mlp.down_proj.weight", shape.hidden, shape.ffn)),
        )

    with torch.inference_mode():
        embedding = read("model.embed_tokens.weight", shape.vocab, shape.hidden)
        return Weights(
            embedding=embedding,
            layers=tuple(layer(number) for number in range(shape.layers)),
            norm=read("model.norm.weight", shape.hidden),
            head=matrix(
                embedding if shape.tied_embeddings else read("lm_head.weight", shape.vocab, shape.hidden)
            ),
        )


def tensor_names(shape: ModelShape) -> list[str]:
    """Hugging Face names of every tensor that ``assemble`` reads."""
    parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
    parts += [f"self_attn.{kind}_proj.weight" for kind in "qkvo"]
    parts += [f"mlp.{kind}_proj.weight" for kind in ("gate", "up", "down")]
    if shape.qkv_bias:
        parts += [f"self_attn.{kind}_proj.bias" for kind in "qkv"]
    if shape.output_bias:
        parts.append("self_attn.o_proj.bias")
    if shape.qk_norm:
        parts += [f"self_attn.{kind}_norm.weight" for kind in "qk"]
    names = [f"model.layers.{layer}.{part}" for layer in range(shape.layers) for part in parts]
    names += ["model.embed_tokens.weight", "model.norm.weight"]
    return names if shape.tied_embeddings else [*names, "lm_head.weight"]


def pairs_adjacent(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Within each head, rows ``a0 a1 ... b0 b1 ...`` become ``a0 b0 a1 b1 ...``.

    Q·K does not change when both are permuted alike, and a rotation of adjacent pairs is one complex
    product.

    >>> pairs_adjacent(torch.tensor([0, 1, 2, 10, 11, 12]), heads=1).tolist()
    [0, 10, 1, 11, 2, 12]
    """
    halves = rows.view(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.swapaxes(1, 2).reshape(rows.shape).contiguous()
