"""A name for what KV depends on beside tokens, so that KV kept on disk is never used with another model."""

from collections.abc import Iterable
from hashlib import blake2b

import torch

from replica.model.load import LoadedModel
from replica.model.matrix import Matrix


def fingerprint(
    model: LoadedModel, block_size: int, *, batch_invariant: bool = False, kv_int8: bool = False
) -> str:
    """32 hex digits over shape, weights, their type, block size and kernels. Reads all weights."""
    digest = blake2b(repr((model.shape, block_size, batch_invariant, kv_int8)).encode(), digest_size=16)
    weights = model.weights
    parts: list[torch.Tensor | Matrix] = [weights.embedding, weights.norm, weights.head]
    for layer in weights.layers:
        parts += [part for name in layer.__slots__ if (part := getattr(layer, name)) is not None]
    tensors = (tensor for part in parts for tensor in _tensors(part))
    for tensor in tensors:
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _tensors(part: torch.Tensor | Matrix) -> Iterable[torch.Tensor]:
    return (part,) if isinstance(part, torch.Tensor) else part.tensors()
