"""vLLM's names for blocks of tokens, so that a prompt's keys equal the hashes in its KV events.

``H(i) = sha256( encode( (H(i-1), tokens of block i, extra keys or None) ) )``, before the first block the
hash of a seed text. Two encodings: Python's pickle (``sha256``, vLLM's default) and canonical CBOR
(``sha256_cbor``). Events carry the low 64 bits. Only the first block's extra keys know the cache salt; every
block's know the images that reach into it. What else vLLM puts there (LoRA paths, prompt embeddings) a
router cannot know.

>>> chain(range(32), 16, "sha256")
[3262291359910021016, 7142137847444424233]
>>> chain(range(32), 16, "sha256_cbor", salt="salt1")[0]
16809245385377282800

Source: vLLM 0.32 ``kv_cache_utils.py``, checked against events recorded from it (tests/router/data).
"""

import pickle
import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from hashlib import sha256
from typing import Literal

from replica.contract.block_hash import hash_number
from replica.contract.multimodal import MultimodalItem, multimodal_keys

VllmAlgorithm = Literal["sha256", "sha256_cbor"]

DEFAULT_SEED = "vllm-none-hash"
"""What vLLM hashes before the first block unless PYTHONHASHSEED is set."""

_PICKLE_PROTOCOL = 5

Extra = tuple[tuple[str | int, ...], ...] | None


def chain(
    tokens: Sequence[int],
    block_tokens: int,
    algorithm: VllmAlgorithm,
    *,
    seed: str | None = None,
    salt: str | None = None,
    items: Sequence[MultimodalItem] = (),
) -> list[int]:
    """64-bit names of the full blocks of ``tokens``; a last partial block has none.

    ``items``: the images in the prompt, under vLLM's identifiers. ``seed`` is the engine's PYTHONHASHSEED,
    if it was started with one. Cost on a busy two-core machine: 3 µs per 16-token block (``sha256_cbor``: 8).
    """
    encode = _pickled if algorithm == "sha256" else _cbor
    parent = _digest_before_first(algorithm, seed)
    extra: Extra = None if salt is None else (("cache_salt", salt),)
    names = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        if items:
            keys = multimodal_keys(items, start, start + block_tokens)
            extra = (*[("mm", name, offset) for name, offset in keys], *(extra or ())) or None
        parent = sha256(encode(parent, tuple(tokens[start : start + block_tokens]), extra)).digest()
        names.append(hash_number(parent))
        extra = None
    return names


@lru_cache(maxsize=64)
def _digest_before_first(algorithm: VllmAlgorithm, seed: str | None) -> bytes:
    text = DEFAULT_SEED if seed is None else seed
    encode: Callable[[str], bytes] = _pickled_text if algorithm == "sha256" else _cbor_text
    return sha256(encode(text)).digest()


def _pickled(parent: bytes, tokens: tuple[int, ...], extra: Extra) -> bytes:
    return pickle.dumps((parent, tokens, extra), protocol=_PICKLE_PROTOCOL)


def _pickled_text(text: str) -> bytes:
    return pickle.dumps(text, protocol=_PICKLE_PROTOCOL)


def _cbor(parent: bytes, tokens: tuple[int, ...], extra: Extra) -> bytes:
    """Canonical CBOR (RFC 8949, 4.2) of the tuple: an array of a byte string, an array of integers, extra."""
    parts = [b"\x83", _cbor_head(2, len(parent)), parent, _cbor_head(4, len(tokens))]
    parts += [_cbor_head(0, token) for token in tokens]
    if extra is None:
        parts.append(b"\xf6")
    else:
        parts.append(_cbor_head(4, len(extra)))
        for key in extra:
            parts.append(_cbor_head(4, len(key)))
            parts += [_cbor_value(part) for part in key]
    return b"".join(parts)


def _cbor_value(value: str | int) -> bytes:
    if isinstance(value, str):
        return _cbor_text(value)
    return _cbor_head(0, value) if value >= 0 else _cbor_head(1, -1 - value)


def _cbor_text(text: str) -> bytes:
    raw = text.encode()
    return _cbor_head(3, len(raw)) + raw


def _cbor_head(major: int, number: int) -> bytes:
    """A major type and its number in the fewest bytes."""
    kind = major << 5
    if number < 24:
        return bytes((kind | number,))
    if number < 0x100:
        return bytes((kind | 24, number))
    if number < 0x1_0000:
        return struct.pack(">BH", kind | 25, number)
    if number < 0x1_0000_0000:
        return struct.pack(">BI", kind | 26, number)
    return struct.pack(">BQ", kind | 27, number)
