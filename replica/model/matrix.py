"""Weights as matrices that rows are multiplied with, laid out once for the kernel that does it.

oneDNN's own layout, all matrices of SmolLM2-135M, one core with AVX-512, ms for 1 / 8 / 32 / 512 rows:
bf16 8 / 11 / 23 / 237 (``functional.linear`` on plain weights: 15 / 17 / 28 / 301), fp32 15 / 20 / 42 / 529
(26 / 146 / 302 / 3,383: MKL has no fast kernels for that processor). A row's result has the same bits however
many rows there are, but for a single row and where FEW_ROWS is named.

For a few rows only the memory's speed counts, and there oneDNN leaves much of it unused: on one core of a
Zen 4 its bf16 kernels read 12 GB/s, FBGEMM's fp16 ones 20, a plain loop 27. All matrices of SmolLM2-135M for
1 / 4 / 8 rows: 21 / 19 / 24 ms with oneDNN, 12 / 17 / 28 with FBGEMM. With AMX (one core
of an Emerald Rapids) it is the other way round: 30 / 31 / 29 with oneDNN, 48 / 52 / 57 with FBGEMM.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as functional

from replica.model.processor import has_amx

LAYOUT_ROWS = 512
"""oneDNN lays a matrix out for this many rows; fewer are as fast as with a layout of their own."""
FEW_ROWS = 4
"""Up to this many rows FBGEMM's fp16 kernels are faster than oneDNN's for bf16 without AMX."""
_LARGEST_HALF_ERROR = 2.0**-9
"""Relative to the largest weight of its row; what rounding to bf16 does to a number as large."""


class Matrix(Protocol):
    """A weight [out, in]."""

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T``: [rows, in] to [rows, out]."""

    def tensors(self) -> Iterable[torch.Tensor]:
        """What it is made of, dense."""


class PlainMatrix:
    """The weight as it is."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._weight = weight

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T``."""
        return functional.linear(rows, self._weight)

    def tensors(self) -> Iterable[torch.Tensor]:
        """The weight."""
        return (self._weight,)


class OneDnnMatrix:
    """The weight in oneDNN's layout; ``weight`` itself is not kept."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), LAYOUT_ROWS)
        self._linear = torch.ops.mkldnn._linear_pointwise.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T``."""
        product: torch.Tensor = self._linear(rows, self._packed, None, "none", [], "")
        return product

    def tensors(self) -> Iterable[torch.Tensor]:
        """The weight, laid out plainly again."""
        return (self._packed.to_dense(),)


class FewRowsMatrix:
    """A bf16 weight laid out twice: as ``many`` has it, and in fp16 for products with at most FEW_ROWS rows.

    Rows and results are bf16 in both; sums are in fp32, in another order.
    """

    def __init__(self, weight: torch.Tensor, many: Matrix) -> None:
        self._many = many
        self._half = torch.ops.quantized.linear_prepack_fp16(weight.float(), None)
        self._linear = torch.ops.quantized.linear_dynamic_fp16.default

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T``."""
        if rows.shape[0] > FEW_ROWS:
            return self._many(rows)
        product: torch.Tensor = self._linear(rows.float(), self._half)
        return product.to(rows.dtype)

    def tensors(self) -> Iterable[torch.Tensor]:
        """The weight; the second layout holds nothing else."""
        return self._many.tensors()

    @staticmethod
    def suits(weight: torch.Tensor) -> bool:
        """Such kernels are the faster ones here, and fp16 holds ``weight`` as well as bf16 needs it."""
        if has_amx():
            return False
        if weight.dtype != torch.bfloat16 or torch.backends.quantized.engine not in ("x86", "fbgemm"):
            return False
        exact = weight.float()
        error = (exact.half().float() - exact).abs_().amax(1)
        return bool((error <= exact.abs().amax(1) * _LARGEST_HALF_ERROR).all())


def matrix(weight: torch.Tensor, *, twice: bool = False) -> Matrix:
    """The fastest form of ``weight`` [out, in] on this machine; ``twice``: it may take its memory twice."""
    form = _one_layout(weight)
    return FewRowsMatrix(weight, form) if twice and FewRowsMatrix.suits(weight) else form


def _one_layout(weight: torch.Tensor) -> Matrix:
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PlainMatrix(weight)
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PlainMatrix(weight)
    return OneDnnMatrix(weight)
