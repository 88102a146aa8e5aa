"""What prefill costs on this machine, from the steps it ran."""

from replica.batch import Batch
from replica.contract.prefill_cost import PrefillCost

ASSUMED = PrefillCost(fixed_s=0.004, per_token_s=62.5e-6)
NEWEST_WEIGHT = 0.1
FEWEST_TOKENS = 16
"""A step with fewer new tokens tells of its fixed cost, and not of what a prefix costs."""
LEAST_SHARE = 0.75
"""Of a step's rows that are prefill; decodes cost something else."""


class PrefillSpeed:
    """A prefill cost of assumed shape, scaled by what was measured.

    >>> from replica.batch import Work
    >>> from replica.sequence import Sequence
    >>> speed = PrefillSpeed(PrefillCost(fixed_s=0.0, per_token_s=1e-3, attention_tokens=1e12))
    >>> step = Batch([Work(Sequence("a", range(100), 1), 0, 100, True)], 0, 0, 100)
    >>> for _ in range(50):
    ...     speed.observe(step, seconds=0.2)                  # twice what was assumed
    >>> round(speed.cost.seconds(100), 2)
    0.2
    """

    def __init__(self, assumed: PrefillCost = ASSUMED) -> None:
        self._assumed = assumed
        self._scale: float | None = None
        self.cost = assumed
        """As far as is known."""

    def observe(self, batch: Batch, seconds: float) -> None:
        """A step took ``seconds``."""
        if batch.prefill_tokens < FEWEST_TOKENS or batch.prefill_tokens < LEAST_SHARE * batch.tokens:
            return
        assumed = self._assumed
        expected_s = assumed.fixed_s + sum(
            assumed.seconds(row.count, row.start) - assumed.fixed_s for row in batch.prefills
        )
        scale = seconds / expected_s
        if self._scale is not None:
            scale = self._scale + NEWEST_WEIGHT * (scale - self._scale)
        self._scale = scale
        self.cost = PrefillCost(
            assumed.fixed_s * scale, assumed.per_token_s * scale, assumed.attention_tokens
        )
