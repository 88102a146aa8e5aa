"""A step as a sum: something fixed, something per decoding request, something per prefill token."""

from dataclasses import dataclass

from replica.batch import Batch


@dataclass(frozen=True, slots=True)
class LinearStepTime:
    """Seconds of a step::

        step_s                                                every step
      + decode_sequence_s * decoding requests
      + decode_context_token_s * KV positions they read
      + prefill_step_s                                        if there is prefill in it (may be below 0)
      + prefill_token_s * sum over chunks of count * (1 + (start + count / 2) / attention_tokens)

    A chunk of ``count`` new tokens at position ``start`` attends to ``start + count / 2`` tokens on average;
    at ``attention_tokens`` attention costs as much as everything else. Prefill is therefore quadratic in the
    length of a cold prompt, as ``replica.contract.prefill_cost`` has it.

    >>> from replica.batch import Work
    >>> from replica.sequence import Sequence
    >>> model = LinearStepTime(step_s=0.008, decode_sequence_s=60e-6, prefill_token_s=62.5e-6)
    >>> round(1000 * model.seconds(Batch((), 20, 100_000, 0)), 2)             # 20 requests decode
    9.2
    >>> chunk = Work(Sequence("a", (), 1), start=8_000, count=4_000, samples=True)
    >>> round(1000 * model.seconds(Batch((chunk,), 0, 0, 4_000)), 1)          # 8 + 250 * (1 + 10 / 64)
    297.1
    """

    step_s: float
    decode_sequence_s: float
    prefill_token_s: float
    attention_tokens: float = 64_000.0
    prefill_step_s: float = 0.0
    decode_context_token_s: float = 0.0

    def seconds(self, batch: Batch) -> float:
        """Seconds to compute ``batch``."""
        seconds = (
            self.step_s
            + self.decode_sequence_s * batch.decode_sequences
            + self.decode_context_token_s * batch.decode_context_tokens
        )
        if batch.prefill_tokens:
            weighted = 0.0
            for chunk in batch.prefills:
                weighted += chunk.count * (1.0 + (chunk.start + chunk.count / 2.0) / self.attention_tokens)
            seconds += self.prefill_step_s + self.prefill_token_s * weighted
        return seconds
