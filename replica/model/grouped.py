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


def quantize(weight: torch.Tensor, bits: int, group: int = GROUP) -> GroupedWeight:
    """``weight`` [out, in] to the nearest codes between each group's least and greatest value.

    Columns are filled up with zeros to whole groups. Scales are exact in bf16, as the kernels keep them.
    """
    columns = -weight.shape[1] % group
    groups = functional.pad(weight.float(), (0, columns)).view(weight.shape[0], -1, group)
    least, greatest = groups.amin(-1), groups.amax(-1)
    steps = 2**bits - 1
    scales = ((greatest - least) / steps).to(torch.bfloat16).float()
    codes = ((groups - least[..., None]) / scales.clamp(min=1e-30)[..., None]).round_().clamp_(0, steps)
    return GroupedWeight(codes.to(torch.uint8).flatten(1), scales, least, bits)
