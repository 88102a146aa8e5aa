"""Engines for which tokens mean something else under every salt, adapter and image.

The tiny model loads no adapters and sees no images, so KV handed out under another identity would give the
right tokens all the same. Here a token is shifted by what its prompt's identity says before the model reads
it: then KV of another identity gives another reply.
"""

import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from replica.batch import Batch, Work
from replica.contract.block_hash import root_frame
from replica.contract.multimodal import MultimodalItem
from replica.engine import Engine
from replica.sequence import Sequence

BYTES = 256
"""Tokens that the tiny models read."""


@dataclass(frozen=True, slots=True)
class Mark:
    """What a request has of an identity beside tokens and salt."""

    adapter: str | None = None
    images: tuple[MultimodalItem, ...] = ()


def told_apart(engine: Engine, marks: Mapping[str, Mark]) -> Engine:
    """``engine``, which from now on gives requests their marks (by request id) and tells identities apart."""
    engine._runner = _Meaning(engine._runner)  # type: ignore[assignment]
    check = engine._scheduler.check

    def marked(sequence: Sequence) -> None:
        mark = marks.get(sequence.request_id, Mark())
        sequence.adapter, sequence.multimodal = mark.adapter, mark.images
        sequence.root = root_frame(sequence.salt, mark.adapter)
        check(sequence)

    engine._scheduler.check = marked  # type: ignore[method-assign]
    return engine


class _Meaning:
    """A runner whose model reads shifted tokens."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def run(self, batch: Batch) -> tuple[tuple[Work, ...], torch.Tensor]:
        """As the real one, of what the tokens mean."""
        written = [(row.sequence, row.sequence.token_ids) for row in batch.rows]
        for row in batch.rows:
            row.sequence.token_ids = self._meant(row)
        try:
            result: tuple[tuple[Work, ...], torch.Tensor] = self._runner.run(batch)
        finally:
            for sequence, tokens in written:
                sequence.token_ids = tokens
        return result

    def _meant(self, row: Work) -> list[int]:
        sequence, start, stop = row.sequence, row.start, row.start + row.count
        tokens = list(sequence.token_ids)
        shift = zlib.crc32(repr((sequence.salt, sequence.adapter)).encode())
        for at in range(start, stop):
            tokens[at] = (tokens[at] + shift) % BYTES
        for item in sequence.multimodal:
            seen = zlib.crc32(item.identifier.encode())
            for at in range(max(start, item.offset), min(stop, item.offset + item.tokens)):
                tokens[at] = (tokens[at] + seen) % BYTES
        return tokens
