"""How the two parts of a cost really stand to each other: learned beside the factor of the whole.

Prefill has a linear and a quadratic part, a decode step a fixed one and one that grows with its batch. The
prior says how much each is; the factor (``calibration``) says how much slower the whole is. Whether the
second part is larger or smaller than the prior has it shows where its share differs between lessons::

    seen / predicted = level * (1 + (part - 1) * share)         share = second / (first + second)

is a straight line over ``share``. It is fitted by least squares whose sums forget; long lessons weigh more; a
lesson counts no more than three times and no less than a third of the usual; a ridge holds ``part`` near what
is already believed (the fleet's, or the prior's 1) until lessons spread widely enough; and it stays within a
fifth and five times.

Worked example, a model whose attention costs twice what the prior says::

    prompt of share 0.2: seen / predicted = 1.2         prompt of share 0.6: 1.6         part = 2, level = 1
"""

from typing import Final

FORGET_PER_OBSERVATION: Final = 0.98
MOST_PART: Final = 5.0
RIDGE: Final = 0.5
"""Spread of shares at which lessons count as much as what is believed: 50 that are 10% off their mean."""
OUTLIER: Final = 3.0
MOST_WEIGHT: Final = 4.0
LESSONS_BEFORE_OUTLIERS: Final = 4.0
MEAN_OF_OTHERS: Final = 5.0
"""Lessons that the mean share of others counts for."""


class CostShape:
    """Learns ``part``; one for a replica, one for the fleet.

    >>> shape = CostShape()
    >>> for k in range(400):                                # the second part costs twice what was predicted
    ...     first, second = (8.0, 2.0) if k % 2 else (4.0, 6.0)
    ...     shape.learn(seen_s=3.0 * (first + 2.0 * second), first_s=first, second_s=second)
    >>> round(shape.part(around=1.0), 2), round(shape.level(factor=4.2, part=2.0, others=shape), 2)
    (1.74, 3.0)
    """

    __slots__ = ("_predicted_s", "_ratio", "_share", "_share_ratio", "_share_square", "_weight", "believed")

    def __init__(self) -> None:
        self.believed: float | None = None
        """What another router had learned, if one told."""
        self.forget()

    def forget(self) -> None:
        """The prior changed: what was learned over the old one means nothing."""
        self.believed = None
        self._predicted_s = 0.0
        self._weight = self._share = self._ratio = self._share_square = self._share_ratio = 0.0

    def fade(self) -> None:
        """What was seen is half as sure."""
        self._keep(0.5)

    def learn(self, seen_s: float, first_s: float, second_s: float) -> None:
        """What was predicted as ``first_s + second_s`` took ``seen_s`` seconds."""
        predicted = first_s + second_s
        share, ratio = second_s / predicted, seen_s / predicted
        if self._weight > LESSONS_BEFORE_OUTLIERS:
            usual = self._ratio / self._weight
            ratio = min(OUTLIER * usual, max(usual / OUTLIER, ratio))
        self._keep(FORGET_PER_OBSERVATION)
        self._predicted_s += (1.0 - FORGET_PER_OBSERVATION if self._predicted_s else 1.0) * (
            predicted - self._predicted_s
        )
        weight = min(MOST_WEIGHT, predicted / self._predicted_s)
        self._weight += weight
        self._share += weight * share
        self._ratio += weight * ratio
        self._share_square += weight * share * share
        self._share_ratio += weight * share * ratio

    def part(self, around: float) -> float:
        """How many times its prediction the second part is, beside the first; ``around``: believed so far."""
        if self.believed is not None:
            around = self.believed
        weight = self._weight
        if not weight:
            return around
        share, ratio = self._share / weight, self._ratio / weight
        spread = self._share_square - share * self._share
        together = self._share_ratio - share * self._ratio
        believed_slope = ratio * (around - 1.0) / (1.0 + (around - 1.0) * share)
        slope = (together + RIDGE * believed_slope) / (spread + RIDGE)
        level = ratio - slope * share
        if level <= 0.0:
            return MOST_PART
        return min(MOST_PART, max(1.0 / MOST_PART, 1.0 + slope / level))

    def level(self, factor: float, part: float, others: "CostShape") -> float:
        """What the first part is to be multiplied with if the usual whole is ``factor`` times the prior."""
        weight = self._weight + MEAN_OF_OTHERS
        usual = others._share / others._weight if others._weight else 0.0
        share = (self._share + MEAN_OF_OTHERS * usual) / weight
        return factor / (1.0 + (part - 1.0) * share)

    def _keep(self, share: float) -> None:
        self._weight *= share
        self._share *= share
        self._ratio *= share
        self._share_square *= share
        self._share_ratio *= share
