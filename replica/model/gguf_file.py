"""Reads a GGUF file: its metadata and its tensors, dequantised one at a time.

The header is read here rather than with ``gguf.GGUFReader``, which makes numpy views of every string of
the vocabulary and takes 4 s for 49,000 tokens where this takes 0.1 s. The quantisation formats are the
``gguf`` package's own. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gguf import quants
from gguf.constants import GGMLQuantizationType

from replica.model.gguf_codes import grouped
from replica.model.grouped import GroupedWeight
from replica.model.shape import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_HF_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_HF_ROOTS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


@dataclass(frozen=True, slots=True)
class _TensorEntry:
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int


class _Cursor:
    """Reads little-endian values one after the other out of the mapped file."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def number(self, code: str) -> Any:
        size = struct.calcsize("<" + code)
        (value,) = struct.unpack_from("<" + code, self._data, self.at)
        self.at += size
        return value

    def string(self) -> str:
        length = self.number("Q")
        self.at += length
        return self._data[self.at - length : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.number(_SCALARS[kind])
        element, count = self.number("I"), self.number("Q")
        if element in (_STRING, _ARRAY):
            return [self.value(element) for _ in range(count)]
        layout = f"<{count}{_SCALARS[element]}"
        values = list(struct.unpack_from(layout, self._data, self.at))
        self.at += struct.calcsize(layout)
        return values


class GgufFile:
    """One GGUF file, mapped into memory: ``metadata`` and tensors under their Hugging Face names."""

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            ModelError: the file is missing, no GGUF, cut short, or of a version we do not know.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"cannot read the GGUF file {path}: {error}") from error
        try:
            self._read_header()
        except (struct.error, KeyError, ValueError, OverflowError) as error:
            raise ModelError(f"{path}: not a complete GGUF file of version 2 or 3 ({error})") from error

    def _read_header(self) -> None:
        cursor = _Cursor(self._data)
        if self._data[:4] != b"GGUF":
            raise ValueError("the file does not start with 'GGUF'")
        cursor.at = 4
        version = cursor.number("I")
        if version not in (2, 3):
            raise ValueError(f"version {version}")
        tensor_count, key_count = cursor.number("Q"), cursor.number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(key_count):
            key = cursor.string()
            self.metadata[key] = cursor.value(cursor.number("I"))
        self._entries: dict[str, _TensorEntry] = {}
        for _ in range(tensor_count):
            name = cursor.string()
            # GGUF writes the fastest axis first.
            shape = tuple(reversed([cursor.number("Q") for _ in range(cursor.number("I"))]))
            kind = GGMLQuantizationType(cursor.number("I"))
            self._entries[name] = _TensorEntry(shape, kind, cursor.number("Q"))
        alignment = int(self.metadata.get("general.alignment", 32))
        self._data_start = -(-cursor.at // alignment) * alignment

    @property
    def tensor_names(self) -> frozenset[str]:
        """GGUF names of all tensors in the file."""
        return frozenset(self._entries)

    def read(self, name: str) -> torch.Tensor:
        """The tensor of this GGUF name, dequantised to fp32.

        Raises:
            ModelError: no such tensor, or the file is cut short.
        """
        raw, entry = self._raw(name)
        if entry.kind == GGMLQuantizationType.F32:
            values = raw.view(np.float32).reshape(entry.shape).copy()
        else:
            values = np.ascontiguousarray(quants.dequantize(raw, entry.kind), dtype=np.float32)
        return torch.from_numpy(values)

    def _raw(self, name: str) -> tuple[npt.NDArray[np.uint8], _TensorEntry]:
        """The stored bytes [out, bytes of a row] of the tensor of this GGUF name."""
        entry = self._entries.get(name)
        if entry is None:
            raise ModelError(f"{self.path}: the tensor {name!r} is missing")
        stored = quants.quant_shape_to_byte_shape(entry.shape, entry.kind)
        try:
            raw = np.frombuffer(
                self._data, dtype=np.uint8, count=int(np.prod(stored)), offset=self._data_start + entry.offset
            ).reshape(stored)
        except ValueError as error:
            raise ModelError(f"{self.path}: cut short in tensor {name!r}: {error}") from error
        return raw, entry

    def tensor(self, hf_name: str) -> torch.Tensor:
        """The tensor with this Hugging Face name, in Hugging Face's layout, fp32.

        Llama GGUFs store the rows of Q and K so that the two halves of a rotated pair are neighbours;
        Hugging Face keeps all first halves before all second halves.

        Raises:
            ModelError: no such tensor.
        """
        values = self.read(_gguf_name(hf_name))
        heads = self._heads_in_pairs(hf_name)
        return values if heads is None else _halves_apart(values, heads)

    def grouped(self, hf_name: str) -> GroupedWeight | None:
        """The matrix with this Hugging Face name as it is stored, in Hugging Face's order of rows.

        None when it is stored in a form that cannot stay packed here. Raises ModelError for no such tensor.
        """
        raw, entry = self._raw(_gguf_name(hf_name))
        weight = grouped(raw, entry.kind)
        heads = self._heads_in_pairs(hf_name)
        if weight is None or heads is None:
            return weight
        return weight.rows(_halves_apart(torch.arange(entry.shape[0]), heads))

    def _heads_in_pairs(self, hf_name: str) -> int | None:
        """Heads whose rows are stored pair by pair; None: in Hugging Face's order."""
        if self.metadata["general.architecture"] != "llama":
            return None
        heads = self.metadata["llama.attention.head_count"]
        if ".q_proj." in hf_name:
            return int(heads)
        if ".k_proj." in hf_name:
            return int(self.metadata.get("llama.attention.head_count_kv", heads))
        return None


def _gguf_name(hf_name: str) -> str:
    stem, _, kind = hf_name.rpartition(".")
    for gguf, hf in _HF_ROOTS.items():
        if stem == hf:
            return f"{gguf}.{kind}"
    _, _, layer, part = stem.split(".", 3)
    for gguf, hf in _HF_NAMES.items():
        if part == hf:
            return f"blk.{layer}.{gguf}.{kind}"
    raise ModelError(f"no GGUF tensor corresponds to {hf_name!r}")


def _halves_apart(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Within each head, rows ``a0 b0 a1 b1 ...`` become ``a0 a1 ... b0 b1 ...``."""
    pairs = rows.view(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:])
    return pairs.swapaxes(1, 2).reshape(rows.shape).contiguous()
