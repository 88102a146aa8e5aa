"""How far simulated times are from measured ones, by the figures that people plan with."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sim.outcome import Outcome
from sim.results import at_share


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure, measured and simulated, in seconds, and how far off it may be."""

    name: str
    measured_s: float
    simulated_s: float
    allowed: float

    @property
    def error(self) -> float:
        """Relative; positive when the simulation is slower than the engine was."""
        return self.simulated_s / self.measured_s - 1.0

    @property
    def within(self) -> bool:
        """Not further off than allowed."""
        return abs(self.error) <= self.allowed


def compare(measured: Sequence[Outcome], simulated: Sequence[Outcome]) -> tuple[Figure, ...]:
    """TTFT p50 and p99, TPOT p50 and mean time to the last token, over requests without error.

    >>> def outcome(scale):
    ...     return Outcome(0.0, 10, 3, 0, ttft_s=scale, e2e_s=3 * scale)
    >>> [round(figure.error, 2) for figure in compare([outcome(1.0)], [outcome(1.1)])]
    [0.1, 0.1, 0.1, 0.1]
    """
    figures: tuple[tuple[str, Callable[[Outcome], float | None], float | None, float], ...] = (
        ("TTFT p50", lambda outcome: outcome.ttft_s, 0.50, 0.10),
        ("TTFT p99", lambda outcome: outcome.ttft_s, 0.99, 0.15),
        ("TPOT p50", lambda outcome: outcome.tpot_s, 0.50, 0.05),
        ("E2E mean", lambda outcome: outcome.e2e_s, None, 0.05),
    )
    return tuple(
        Figure(name, _value(measured, time, share), _value(simulated, time, share), allowed)
        for name, time, share, allowed in figures
    )


def _value(
    outcomes: Sequence[Outcome], time: Callable[[Outcome], float | None], share: float | None
) -> float:
    values = sorted(
        value for outcome in outcomes if outcome.error is None and (value := time(outcome)) is not None
    )
    if not values:
        raise ValueError("nothing to compare: no request without error")
    return sum(values) / len(values) if share is None else at_share(values, share)
