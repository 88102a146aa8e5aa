"""What runs in one step: rows of decode and prefill work, with the totals that price them."""

from collections import abc
from dataclasses import dataclass

from replica.sequence import Sequence


# Not frozen: one is made per running sequence and step, and a frozen one costs three times as much.
@dataclass(slots=True)
class Work:
    """One sequence's share of a step: compute KV of positions ``start .. start + count - 1``.

    The tokens are ``sequence.token_ids[start : start + count]``; they attend to positions
    ``0 .. start + count - 1`` in ``sequence.block_table``, which already has room for all of them.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    """The last position's logits give the next token (every known token is computed after this row)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """One step. Rows are decodes first (``count`` 1, ``samples``), then prefill chunks.

    ``StepTime.seconds(batch)`` and the torch runner receive the same value. A batch that stands for a run
    of identical decode steps (``Scheduler.decode_batch``) has totals but no rows.
    """

    rows: abc.Sequence[Work]
    decode_sequences: int
    """Rows that generate one token each; they are ``rows[:decode_sequences]``."""
    decode_context_tokens: int
    """KV positions the decode rows read, together: the sum of ``start + 1``."""
    prefill_tokens: int
    """New positions of all prefill rows together."""

    @property
    def prefills(self) -> abc.Sequence[Work]:
        """The prefill rows, each with ``count`` new tokens at position ``start``."""
        return self.rows[self.decode_sequences :]

    @property
    def decodes(self) -> abc.Sequence[Work]:
        """The decode rows."""
        return self.rows[: self.decode_sequences]

    @property
    def tokens(self) -> int:
        """Positions computed in this step."""
        return self.decode_sequences + self.prefill_tokens

    @property
    def empty(self) -> bool:
        """Nothing to run."""
        return self.tokens == 0
