"""The weights as the decoder wants them: Q, K and V in one matrix, gate and up too, rotary pairs adjacent."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from replica.model.fitted_matrix import FittedMatrix
from replica.model.grouped import GroupedWeight, quantize, stack
from replica.model.matrix import Matrix, matrix
from replica.model.packed_matrix import PackedMatrix, StackedMatrix
from replica.model.shape import ModelError, ModelShape

EDGE_BITS = 8
"""Of the first and the last layer and the matrix after them, where the others have 4: what the first errs all
layers carry on, what the last err goes straight into the logits."""

TWICE_BELOW_BYTES = 2**30
"""Matrices that are together no larger are kept in a second layout too, where that makes decode faster."""


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
    decay: Matrix | None = None
    """[kv_heads, hidden], of a recurrent layer."""


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a model; ``head`` is made of the embedding when they are tied."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: Matrix


def assemble(
    source: TensorSource,
    shape: ModelShape,
    dtype: torch.dtype,
    *,
    bits: int | None = None,
    stored: Callable[[str], GroupedWeight | None] | None = None,
    fits: bool = False,
) -> Weights:
    """Read every weight from ``source`` and lay it out for the decoder.

    Matrices are kept in ``dtype``; or with ``bits`` (4 or 8) quantised; or as ``stored`` has them, where
    that can stay packed. ``fits``: those of the layers are quantised by their first product (``fitting``).

    Raises:
        ModelError: a tensor is missing or has another shape than ``shape`` says.
    """

    twice = matrix_weights(shape) * dtype.itemsize <= TWICE_BELOW_BYTES

    def read(name: str, *expected: int) -> torch.Tensor:
        values = source.tensor(name)
        if tuple(values.shape) != expected:
            raise ModelError(f"tensor {name!r} has shape {tuple(values.shape)}, expected {expected}")
        return values.to(dtype)

    def any_matrix(columns: int, *parts: _Rows, bits: int | None = bits, fits: bool = fits) -> Matrix:
        """The rows of all ``parts``, one below the other."""
        if stored is not None:
            found = [stored(part.name) for part in parts]
            packed = [weight.rows(part.order()) for weight, part in zip(found, parts, strict=True) if weight]
            if len(packed) == len(parts) and len({(one.bits, one.group) for one in packed}) == 1:
                return PackedMatrix(stack(packed))
            if packed:
                return StackedMatrix(
                    [
                        PackedMatrix(weight.rows(part.order()))
                        if weight is not None
                        else matrix(read(part.name, part.rows, columns)[part.order()], twice=twice)
                        for weight, part in zip(found, parts, strict=True)
                    ]
                )

        def whole() -> torch.Tensor:
            return torch.cat([read(part.name, part.rows, columns)[part.order()] for part in parts])

        if bits is None:
            return matrix(whole(), twice=twice)
        if fits:
            return FittedMatrix(whole, bits)
        return PackedMatrix(quantize(whole(), bits))

    def layer(number: int) -> LayerWeights:
        edge = bits is not None and number in (0, shape.layers - 1)
        matrix_of = partial(any_matrix, bits=EDGE_BITS if edge else bits)
        prefix = f"model.layers.{number}"
        attention = f"{prefix}.self_attn"
        q = _Rows(f"{attention}.q_proj.weight", shape.heads * shape.head_dim, shape.heads)
        k = _Rows(f"{attention}.k_proj.weight", shape.kv_heads * shape.head_dim, shape.kv_heads)
        v = _Rows(f"{attention}.v_proj.weight", shape.kv_heads * shape.head_dim)
        qkv_bias = q_norm = k_norm = output_bias = None
        if shape.qkv_bias:
            biases = [
                read(f"{attention}.{kind}_proj.bias", part.rows)[part.order()]
                for kind, part in (("q", q), ("k", k), ("v", v))
            ]
            qkv_bias = torch.cat(biases)
        if shape.output_bias:
            output_bias = read(f"{attention}.o_proj.bias", shape.hidden)
        if shape.qk_norm:
            q_norm = pairs_adjacent(read(f"{attention}.q_norm.weight", shape.head_dim), 1)
            k_norm = pairs_adjacent(read(f"{attention}.k_norm.weight", shape.head_dim), 1)
        return LayerWeights(
            attention_norm=read(f"{prefix}.input_layernorm.weight", shape.hidden),
            qkv=matrix_of(shape.hidden, q, k, v),
            qkv_bias=qkv_bias,
            q_norm=q_norm,
            k_norm=k_norm,
            output=matrix_of(q.rows, _Rows(f"{attention}.o_proj.weight", shape.hidden)),
            output_bias=output_bias,
            ffn_norm=read(f"{prefix}.post_attention_layernorm.weight", shape.hidden),
            gate_up=matrix_of(
                shape.hidden,
                _Rows(f"{prefix}.mlp.gate_proj.weight", shape.ffn),
                _Rows(f"{prefix}.mlp.up_proj.weight", shape.ffn),
            ),
            down=matrix_of(shape.ffn, _Rows(f"{prefix}.mlp.down_proj.weight", shape.hidden)),
            decay=matrix_of(shape.hidden, _Rows(f"{attention}.decay_proj.weight", shape.kv_heads))
            if number in shape.recurrent
            else None,
        )

    embedding_name = "model.embed_tokens.weight"
    with torch.inference_mode():
        return Weights(
            embedding=read(embedding_name, shape.vocab, shape.hidden),
            layers=tuple(layer(number) for number in range(shape.layers)),
            norm=read("model.norm.weight", shape.hidden),
            head=any_matrix(
                shape.hidden,
                _Rows(embedding_name if shape.tied_embeddings else "lm_head.weight", shape.vocab),
                bits=None if bits is None else EDGE_BITS,
                fits=False,
            ),
        )


@dataclass(frozen=True, slots=True)
class _Rows:
    """A tensor that becomes rows of a matrix; those of ``rotated`` heads are put pair by pair."""

    name: str
    rows: int
    rotated: int | None = None

    def order(self) -> torch.Tensor:
        """Which row of the tensor each row of the matrix is."""
        places = torch.arange(self.rows)
        return places if self.rotated is None else pairs_adjacent(places, self.rotated)


def matrix_weights(shape: ModelShape) -> int:
    """How many weights the matrices of all layers and the head have."""
    attention = 2 * (shape.heads + shape.kv_heads) * shape.head_dim
    return (shape.layers * (attention + 3 * shape.ffn) + shape.vocab) * shape.hidden


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
    names += [f"model.layers.{layer}.self_attn.decay_proj.weight" for layer in sorted(shape.recurrent)]
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
