"""A matrix that is packed by its first product: so that it serves inputs like those best."""

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as functional

from replica.model.grouped import quantize
from replica.model.packed_matrix import PackedMatrix


class FittedMatrix:
    """Reads its weight when it is first multiplied, and keeps it in ``packed`` alone."""

    def __init__(self, read: Callable[[], torch.Tensor], bits: int) -> None:
        """``read``: the weight [out, in]."""
        self._read = read
        self._bits = bits
        self.packed: PackedMatrix | None = None

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T`` of the weight as it was read."""
        weight = self._read()
        if self.packed is None:
            self.packed = PackedMatrix(quantize(weight, self._bits, importance=importance(rows)))
        return functional.linear(rows.float(), weight.float()).to(rows.dtype)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Of the packed form. Raises ValueError before the first product."""
        if self.packed is None:
            raise ValueError("a matrix was to be fitted and never multiplied")
        return self.packed.tensors()


def importance(rows: torch.Tensor) -> torch.Tensor:
    """How large each column's square is on average, as a power of the square root of 2.

    So coarse that processors whose sums differ in the last bits pack the same codes, and KV that one
    computed is good for the other.

    >>> importance(torch.tensor([[1.0, 2.0, 0.0], [1.0, 2.2, 0.0]])).tolist()[:2]
    [1.0, 4.0]
    """
    squares = rows.float().square().mean(0)
    least = squares.amax().clamp(min=1e-20) * 1e-6
    return torch.exp2((2 * squares.clamp(min=least).log2()).round() / 2)
