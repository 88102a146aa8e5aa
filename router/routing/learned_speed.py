"""How a replica's speed is told in reports, and how far off the prior what was learned may be."""

from typing import Final, NamedTuple

SLOWEST: Final = 10_000.0
FASTEST: Final = 0.000_1


class CostFit(NamedTuple):
    """What work costs on one replica as it is predicted now, and how far off predictions were lately."""

    prefill_fixed_s: float
    prefill_per_token_s: float
    attention_tokens: float
    """Where attention doubles what a token costs (``PrefillCost``)."""
    step_fixed_s: float
    step_per_sequence_s: float
    prefill_error: float
    """Mean of ``|seen / predicted - 1|`` over about the last 20 lessons, each before it was learned from."""
    step_error: float
    """The same of decode steps."""


def bounded(factor: float) -> float:
    """No further off the prior than is believed."""
    return min(SLOWEST, max(FASTEST, factor))
