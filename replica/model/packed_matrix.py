"""A matrix that stays packed in 4 or 8 bits: unpacked in the kernel for few rows, into a workspace for many.

torch's kernel for 4 bits on CPUs reads each weight once per row. All of SmolLM2-135M but the embedding, one
core with AVX-512: 2.7 ms for 1 row, 9.7 for 8 (bf16 weights: 8 and 11), but 38 for 32. Unpacking costs 60 ms
whatever the rows. 8 bits are two planes of 4: ``16 * high + low``.
"""

from collections.abc import Iterable, Sequence
from functools import cache

import torch
import torch.nn.functional as functional

from replica.model.grouped import GroupedWeight
from replica.model.matrix import Matrix

FEW_ROWS = 48
"""Up to this many rows the kernel that unpacks is faster than unpacking first."""
_OUT_UNIT = 64
"""The kernel's layouts are made of this many outputs, or a divisor of it."""
_MIDDLE = 8
"""The kernel subtracts this from every code."""


class PackedMatrix:
    """A grouped weight in the layout of torch's 4-bit kernel; computes in bf16."""

    def __init__(self, weight: GroupedWeight) -> None:
        out, columns = weight.codes.shape
        self._out, self._columns, self._group = out, columns, weight.group
        fill = (0, 0, 0, -out % _OUT_UNIT)
        codes = functional.pad(weight.codes, fill).int()
        scales, offsets = functional.pad(weight.scales, fill), functional.pad(weight.offsets, fill)
        if weight.bits == 8:
            high = _plane(codes >> 4, 16 * scales, offsets)
            self._planes = [high, _plane(codes & 15, scales, torch.zeros_like(offsets))]
        else:
            self._planes = [_plane(codes, scales, offsets)]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """``rows @ weight.T``; ``rows`` may lack columns that were filled up to whole groups."""
        inputs = functional.pad(rows.to(torch.bfloat16), (0, self._columns - rows.shape[1]))
        lanes = _lanes() if rows.shape[0] > FEW_ROWS else None
        if lanes is not None:
            return functional.linear(inputs, self._dense(lanes)).to(rows.dtype)
        total = self._product(inputs, *self._planes[0])
        for plane in self._planes[1:]:
            total += self._product(inputs, *plane)
        return total[:, : self._out].to(rows.dtype)

    def tensors(self) -> Iterable[torch.Tensor]:
        """Codes and scales of every plane."""
        return (part for plane in self._planes for part in plane)

    def _product(self, rows: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, codes, self._group, scales)
        return found

    def _dense(self, lanes: int) -> torch.Tensor:
        """[out, in], bf16; ``lanes`` outputs lie side by side in the layout."""
        total = torch.zeros(())
        for codes, scales in self._planes:
            blocks = codes.view(-1, self._columns, lanes // 2)
            values = torch.empty(*blocks.shape[:2], lanes)
            values[..., : lanes // 2] = blocks & 15
            values[..., lanes // 2 :] = blocks >> 4
            # [blocks, groups, 1, lanes] each
            scale, zero = scales.float().view(scales.shape[0], -1, 1, lanes, 2).transpose(0, 1).unbind(-1)
            groups = values.view(blocks.shape[0], -1, self._group, lanes)
            total = groups.mul_(scale).add_(zero - _MIDDLE * scale).view(values.shape) + total
        return total.transpose(1, 2).reshape(-1, self._columns)[: self._out].to(torch.bfloat16)


class StackedMatrix:
    """Matrices of the same input, one below the other, that cannot be one."""

    def __init__(self, parts: Sequence[Matrix]) -> None:
        self._parts = tuple(parts)

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """The parts' outputs side by side."""
        return torch.cat([part(rows) for part in self._parts], 1)

    def tensors(self) -> Iterable[torch.Tensor]:
        """The parts' tensors."""
        return (tensor for part in self._parts for tensor in part.tensors())


def _plane(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Packed codes, and [groups, out, 2]: scale and the middle code's value, as the kernel wants them."""
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 1)
    pairs = torch.stack([scales, offsets + _MIDDLE * scales], -1)
    return packed, pairs.transpose(0, 1).contiguous().to(torch.bfloat16)


@cache
def _lanes() -> int | None:
    """Outputs side by side in the layout this processor's kernel has; None: no layout we know.

    A block of n outputs has, for each input, n / 2 bytes: output i in the low half of byte i, output
    n / 2 + i in its high half.
    """
    codes = torch.randint(16, (_OUT_UNIT, 32), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
    for lanes in (64, 32, 16):
        blocks = packed.view(-1, 32, lanes // 2)
        unpacked = torch.cat([blocks & 15, blocks >> 4], 2).transpose(1, 2).reshape(codes.shape)
        if torch.equal(unpacked.int(), codes):
            return lanes
    return None
