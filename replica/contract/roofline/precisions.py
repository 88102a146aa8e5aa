"""Precisions of a served model: bits a weight takes in memory, and in which type the math is done.

Weights that multiply (attention, MLP, experts) are quantized; embeddings and the output layer stay at 16
bits, as the usual quantized checkpoints have them.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Precision:
    """How weights are stored and multiplied.

    >>> PRECISIONS["int4"].weight_bits, PRECISIONS["int4"].math
    (4.125, 'bf16')
    """

    name: str
    weight_bits: float
    """Per quantized weight, scales included."""
    math: str
    """Key of ``Gpu.math_per_s``: the operands' type."""


def _grouped(bits: int, scale_bits: int, group: int) -> float:
    return bits + scale_bits / group


PRECISIONS: Mapping[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("bf16", 16.0, "bf16"),
        Precision("fp8", 8.0, "fp8"),  # W8A8; scales per tensor or channel take nothing worth counting
        Precision("int8", 8.0, "int8"),  # W8A8
        # Weight-only: dequantized to 16 bits on the way to the multiplier, so the math gets no faster.
        Precision("int4", _grouped(4, 16, 128), "bf16"),  # GPTQ and AWQ: a 16-bit scale per 128 weights
        Precision("mxfp4", _grouped(4, 8, 32), "bf16"),  # OCP MX: an 8-bit scale per 32 weights
    )
}
EMBEDDING_BITS = 16.0
