"""The codes of GGUF's quantised blocks as they are, for weights that stay packed.

Layouts: https://github.com/ggml-org/ggml/blob/master/src/ggml-common.h
"""

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from replica.model.grouped import GroupedWeight

GROUP = 32
"""Weights that share a scale in all of them."""
Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


def grouped(raw: Bytes, kind: GGMLQuantizationType) -> GroupedWeight | None:
    """The matrix in ``raw`` [out, bytes of a row], or None for a kind whose groups are none of ours."""
    if kind not in _READERS:
        return None
    reader, block_bytes = _READERS[kind]
    blocks = raw.reshape(-1, block_bytes)
    codes, scales, offsets = reader(blocks)
    out = raw.shape[0]
    bits = 8 if kind == GGMLQuantizationType.Q8_0 else 4
    return GroupedWeight(
        torch.from_numpy(codes.reshape(out, -1)),
        torch.from_numpy(scales.reshape(out, -1)),
        torch.from_numpy(offsets.reshape(out, -1)),
        bits,
    )


def _q8_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks[:, :2])
    codes = (blocks[:, 2:].view(np.int8).astype(np.int16) + 128).astype(np.uint8)
    return codes, scales, -128 * scales


def _q4_0(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    scales = _half(blocks[:, :2])
    return _nibbles(blocks[:, 2:]), scales, -8 * scales


def _q4_1(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    return _nibbles(blocks[:, 4:]), _half(blocks[:, :2]), _half(blocks[:, 2:4])


def _q4_k(blocks: Bytes) -> tuple[Bytes, Floats, Floats]:
    small, least = quants.Q4_K.get_scale_min(np.ascontiguousarray(blocks[:, 4:16]))
    scales = _half(blocks[:, :2]) * small.astype(np.float32)
    offsets = -_half(blocks[:, 2:4]) * least.astype(np.float32)
    return _nibbles(blocks[:, 16:].reshape(-1, 4, GROUP)), scales, offsets


def _nibbles(packed: Bytes) -> Bytes:
    """[..., n] bytes to [..., 2 n] codes: low halves before high halves."""
    return np.concatenate([packed & 15, packed >> 4], axis=-1)


def _half(two_bytes: Bytes) -> Floats:
    return np.ascontiguousarray(two_bytes).view(np.float16).astype(np.float32)


_READERS = {
    GGMLQuantizationType.Q8_0: (_q8_0, 34),
    GGMLQuantizationType.Q4_0: (_q4_0, 18),
    GGMLQuantizationType.Q4_1: (_q4_1, 20),
    GGMLQuantizationType.Q4_K: (_q4_k, 144),
}
"""(reader, bytes of a block): one group a block, in Q4_K eight."""
