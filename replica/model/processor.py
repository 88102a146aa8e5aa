"""What the processor has that decides which of torch's kernels is the fastest."""

import functools

import torch


@functools.cache
def has_amx() -> bool:
    """It multiplies tiles of bf16 matrices (Intel AMX, from Sapphire Rapids on), and torch can tell."""
    asked = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return asked is not None and bool(asked())
