"""What work costs: seconds to prefill n new tokens at position p, seconds of one decode step."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """Seconds of prefill as a function of how many tokens are new and where they stand.

    ``seconds(m, h) = fixed_s + per_token_s * m * (1 + (h + m / 2) / attention_tokens)``

    ``m`` new tokens follow ``h`` cached ones. Every new token costs ``per_token_s`` for the weights'
    arithmetic and, because it attends to all tokens before it (``h + m / 2`` of them on average), as
    much again for attention once its position reaches ``attention_tokens``.

    Worked example, a replica with 4 ms + 31 µs a token, attention doubling at 64,000 tokens:

    >>> cost = PrefillCost(fixed_s=0.004, per_token_s=31e-6, attention_tokens=64_000)
    >>> round(1000 * cost.seconds(3_300, 0), 1)           # cold: 3,300 new tokens
    108.9
    >>> round(1000 * cost.seconds(400, 2_900), 1)         # warm: 2,900 of them cached
    17.0
    """

    fixed_s: float
    per_token_s: float
    attention_tokens: float = 64_000.0

    def seconds(self, new_tokens: int, position: int = 0) -> float:
        """Seconds to prefill ``new_tokens`` that follow ``position`` cached tokens."""
        return self.fixed_s + self.per_token_s * new_tokens * (
            1.0 + (position + new_tokens / 2.0) / self.attention_tokens
        )


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """Seconds of one decode step: ``fixed_s + per_sequence_s * sequences``.

    >>> round(1000 * DecodeCost(fixed_s=0.008, per_sequence_s=60e-6).step_seconds(20), 2)
    9.2
    """

    fixed_s: float
    per_sequence_s: float

    def step_seconds(self, sequences: int) -> float:
        """Seconds one step takes while ``sequences`` requests decode together."""
        return self.fixed_s + self.per_sequence_s * sequences
