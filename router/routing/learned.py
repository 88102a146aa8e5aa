"""What was learned of a replica's speed, as it goes to other routers and into snapshots.

Never compiled: msgspec reads the types of its fields, and a compiled class keeps no more than ``type`` of
``tuple[float, float]``.
"""

from typing import NamedTuple

from router.routing.cost_shape import Parts
from router.routing.learned_speed import FASTEST, SLOWEST


class Learned(NamedTuple):
    """What was learned, to be taken up again by another router or after a restart."""

    busy_s: float
    token_s: float
    """By the prior, for the tokens of what was done in ``busy_s``; likewise the next two."""
    attention_s: float
    fixed_s: float
    prefills: int
    decode_factor: float
    decodes: int
    prior_s: float
    """What the prior says of 1,000 tokens: what was learned over one says nothing over another."""
    prefill: tuple[float, float] = (1.0, 1.0)
    """Attention and the fixed part of a prefill: times what the prior has (``cost_shape``)."""
    batch: tuple[float, float] = (1.0, 1.0)
    """Sequences in a decode step: likewise."""

    def fits(self, prior_s: float) -> bool:
        """It can be what was learned, over this prior."""
        return (
            0.99 * prior_s < self.prior_s < 1.01 * prior_s
            and 0.0 < self.busy_s < float("inf")
            and self.token_s >= 0.0
            and self.attention_s >= 0.0
            and self.fixed_s >= 0.0
            and 0.0 < self.token_s + self.attention_s + self.fixed_s < float("inf")
            and FASTEST <= self.decode_factor <= SLOWEST
            and self.prefill == Parts(*self.prefill).bounded.pair
            and self.batch == Parts(*self.batch).bounded.pair
            and self.prefills >= 0
            and self.decodes >= 0
        )
