"""What is added to attention scores: 0 where a query sees a key, minus infinity where not."""

import torch

from replica.model.step_plan import DecodeGroup


class AttentionMasks:
    """Masks of one step in ``dtype``, each made once for all layers."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._chunks: dict[tuple[int, int, int, int | None, int], torch.Tensor] = {}
        self._decodes: dict[tuple[int, int], torch.Tensor] = {}

    def chunk(self, rows: int, context: int, prefix: int, window: int | None, group: int = 1) -> torch.Tensor:
        """[rows * group, context]: query i, at position prefix + i, sees keys up to its own position.

        Each query is ``group`` rows, one for each head of its group.

        >>> AttentionMasks(torch.float32).chunk(2, 4, 1, None).tolist()
        [[0.0, 0.0, -inf, -inf], [0.0, 0.0, 0.0, -inf]]
        """
        key = (rows, context, prefix, window, group)
        found = self._chunks.get(key)
        if found is None:
            found = torch.full((rows, context), float("-inf"), dtype=self._dtype).triu_(prefix + 1)
            if window is not None:
                at = torch.arange(prefix, prefix + rows)[:, None]
                found.masked_fill_(torch.arange(context) <= at - window, float("-inf"))
            self._chunks[key] = found = found.repeat_interleave(group, 0) if group > 1 else found
        return found

    def decode(self, group: DecodeGroup, window: int) -> torch.Tensor:
        """[rows, 1, 1, context]: each row sees the last ``window`` of its keys."""
        key = (group.first, window)
        found = self._decodes.get(key)
        if found is None:
            places, lengths = torch.arange(group.context), group.lengths[:, None, None, None]
            found = torch.zeros(len(group.lengths), 1, 1, group.context, dtype=self._dtype)
            found.masked_fill_((places >= lengths) | (places < lengths - window), float("-inf"))
            self._decodes[key] = found
        return found
