"""Weights as small whole numbers, with one scale and one offset per group of neighbours in a row.

>>> weight = torch.tensor([[0.0, 4.9, 10.1, 15.0, -4.0, 3.5, 0.5, -1.0]])
>>> packed = quantize(weight, bits=4, group=4)
>>> packed.codes.tolist(), packed.dense().tolist()
([[0, 5, 10, 15, 0, 15, 9, 6]], [[0.0, 5.0, 10.0, 15.0, -4.0, 3.5, 0.5, -1.0]])
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as functional

GROUP = 128
"""Weights that share a scale, where we choose."""
SHARES = (1.0, 0.94, 0.88, 0.82, 0.76, 0.7, 0.64)
"""Of a group's whole range, those that are tried."""
LEAST = 1e-30


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [out, in]: ``codes * scales + offsets``."""

    codes: torch.Tensor
    """[out, in], uint8."""
    scales: torch.Tensor
    """[out, groups], fp32; a group is ``in / groups`` neighbours."""
    offsets: torch.Tensor
    """[out, groups], fp32."""
    bits: int
    """4 or 8: codes are below 2 ** bits."""

    @property
    def group(self) -> int:
        """Weights in a group."""
        return self.codes.shape[1] // self.scales.shape[1]

    def rows(self, order: torch.Tensor) -> "GroupedWeight":
        """The rows named by ``order`` [rows], in that order."""
        return GroupedWeight(self.codes[order], self.scales[order], self.offsets[order], self.bits)

    def dense(self) -> torch.Tensor:
        """[out, in], fp32."""
        groups = self.codes.view(*self.scales.shape, self.group).float()
        return (groups * self.scales[..., None] + self.offsets[..., None]).view(self.codes.shape)


def stack(parts: Sequence[GroupedWeight]) -> GroupedWeight:
    """Their rows one below the other; all have the same group and bits."""
    return GroupedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        torch.cat([part.offsets for part in parts]),
        parts[0].bits,
    )


def quantize(
    weight: torch.Tensor, bits: int, group: int = GROUP, importance: torch.Tensor | None = None
) -> GroupedWeight:
    """``weight`` [out, in] in codes of ``bits``; with ``importance`` [in] those that serve the product best.

    Without it, the nearest codes between each group's least and greatest value. With it (how large each
    input's square is, relative to others'), of a few narrower ranges and the scale and offset that fit their
    codes best, the one with the least weighted error: values at the edge may be cut off. Columns are filled
    up with zeros to whole groups. Scales are exact in bf16, as the kernels keep them.
    """
    columns = -weight.shape[1] % group
    groups = functional.pad(weight.float(), (0, columns)).view(weight.shape[0], -1, group)
    least, greatest = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    steps = 2**bits - 1
    scales = _bf16((greatest - least) / steps)
    if importance is None:
        codes = _codes(groups, scales, least, steps)
        return GroupedWeight(codes.to(torch.uint8).flatten(1), scales[..., 0], least[..., 0], bits)
    weights = functional.pad(importance.float(), (0, columns)).view(1, -1, group)
    weights = weights / _sum(weights).clamp(min=LEAST)
    least_error = torch.full_like(least, torch.inf)
    offsets = least
    for share in SHARES:
        width, middle = (greatest - least) * share, (greatest + least) / 2
        scale, offset = _fitted(groups, _codes(groups, width / steps, middle - width / 2, steps), weights)
        codes = _codes(groups, scale, offset, steps)
        error = _sum(weights * (codes * scale + offset - groups).square())
        better = error < least_error
        least_error = torch.where(better, error, least_error)
        scales, offsets = torch.where(better, scale, scales), torch.where(better, offset, offsets)
    codes = _codes(groups, scales, offsets, steps)
    return GroupedWeight(codes.to(torch.uint8).flatten(1), scales[..., 0], offsets[..., 0], bits)


def _codes(groups: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, steps: int) -> torch.Tensor:
    """The nearest codes, 0 to ``steps``."""
    return ((groups - offsets) / scales.clamp(min=LEAST)).round_().clamp_(0, steps)


def _fitted(
    groups: torch.Tensor, codes: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale, exact in bf16, and offset of the straight line through (code, value), by least squares."""
    mean_code, mean = _sum(weights * codes), _sum(weights * groups)
    apart = weights * (codes - mean_code)
    scale = _bf16((_sum(apart * groups) / _sum(apart * codes).clamp(min=LEAST)).clamp(min=0))
    return scale, mean - scale * mean_code


def _sum(values: torch.Tensor) -> torch.Tensor:
    """Over each group; in fp64, so that every machine rounds it to the same fp32."""
    return values.sum(-1, keepdim=True, dtype=torch.float64).float()


def _bf16(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.bfloat16).float()
