"""Weights as matrices that rows are multiplied with, laid out once for the kernel that does it.

oneDNN's own layout, all matrices of SmolLM2-135M, one core with AVX-512, ms for 1 / 8 / 32 / 512 rows:
bf16 8 / 11 / 23 / 237 (``functional.linear`` on plain weights: 15 / 17 / 28 / 301), fp32 15 / 20 / 42 / 529
(26 / 146 / 302 / 3,383: MKL has no fast kernels for that processor). A row's result has the same bits however
many rows there are, but for a single row.
"""

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.nn.functional as functional

LAYOUT_ROWS = 512
"""oneDNN lays a matrix out for this many rows; fewer are as fast as with a layout of their own."""


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

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T``."""
        product: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, None, "none", [], "")
        return product

    def tensors(self) -> Iterable[torch.Tensor]:
        """The weight, laid out plainly again."""
        return (self._packed.to_dense(),)


def matrix(weight: torch.Tensor) -> Matrix:
    """The fastest form of ``weight`` [out, in] on this machine."""
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return PlainMatrix(weight)
    if weight.dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return PlainMatrix(weight)
    return OneDnnMatrix(weight)
