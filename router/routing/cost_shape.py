"""How the parts of a cost really stand to each other: learned beside the factor of the whole.

Prefill has a part that grows with its tokens, attention's and a fixed one; a decode step a fixed one and one
that grows with its batch. The prior says how much each is; the factor (``calibration``) says how much slower
the whole is. Whether a part is larger or smaller than the prior has it, beside the first, shows where its
share differs between lessons::

    seen / predicted = level * (1 + (second - 1) * share of the second + (third - 1) * share of the third)

is a plane over the shares. It is fitted by least squares whose sums forget; long lessons weigh more; a lesson
counts no more than three times and no less than a third of what the plane says; a ridge holds each part near
what is already believed (the fleet's, or the prior's 1) until lessons spread widely enough; and parts stay
bounded.

Worked example, a model whose attention costs twice what the prior says, its fixed part five times::

    shares .2 and .1: seen / predicted = 1.6       .6 and 0: 1.6       0 and .5: 3.0       level = 1
"""

from typing import Final

FORGET_PER_OBSERVATION: Final = 0.98
MOST_SECOND: Final = 5.0
MOST_THIRD: Final = 30.0
"""A fixed part is a small share of the whole where it is far off: 4 ms that are 40 beside 10 µs for 62.5."""
RIDGE_SECOND: Final = 0.5
"""Spread of shares at which lessons count as much as what is believed: 50 that are 10% off their mean."""
RIDGE_THIRD: Final = 0.1
OUTLIER: Final = 3.0
MOST_WEIGHT: Final = 4.0
LESSONS_BEFORE_OUTLIERS: Final = 4.0
FIRST_PART_AT_LEAST: Final = 0.02
"""Of the usual whole, where lessons say that the first part costs nothing."""
MEAN_OF_OTHERS: Final = 5.0
"""Lessons that the mean shares of others count for."""


class Parts:
    """How many times its prediction a part is, beside the first. Never changed."""

    __slots__ = ("second", "third")

    def __init__(self, second: float, third: float) -> None:
        self.second = second
        self.third = third

    @property
    def pair(self) -> tuple[float, float]:
        """Second and third, as other routers are told."""
        return self.second, self.third

    @property
    def bounded(self) -> "Parts":
        """No further off than is believed."""
        return Parts(
            min(MOST_SECOND, max(1.0 / MOST_SECOND, self.second)),
            min(MOST_THIRD, max(1.0 / MOST_THIRD, self.third)),
        )

    def times(self, second_share: float, third_share: float) -> float:
        """How many times what was predicted a whole of these shares is, if its first part is as predicted."""
        return 1.0 + (self.second - 1.0) * second_share + (self.third - 1.0) * third_share


AS_PREDICTED: Final = Parts(1.0, 1.0)


class CostShape:
    """Learns ``parts``; one for a replica, one for the fleet.

    >>> shape = CostShape()
    >>> for k in range(400):                                # the second part costs twice what was predicted
    ...     first, second = (8.0, 2.0) if k % 2 else (4.0, 6.0)
    ...     shape.learn(seen_s=3.0 * (first + 2.0 * second), first_s=first, second_s=second)
    >>> parts = shape.fit(around=AS_PREDICTED)
    >>> round(parts.second, 2), parts.third, round(shape.level(4.2, Parts(2.0, 1.0), others=shape), 2)
    (1.74, 1.0, 3.0)
    """

    __slots__ = (
        "_parts",
        "_predicted_s",
        "_ratio",
        "_second",
        "_second_ratio",
        "_second_square",
        "_second_third",
        "_third",
        "_third_ratio",
        "_third_square",
        "_weight",
        "believed",
    )

    def __init__(self) -> None:
        self.believed: Parts | None = None
        """What another router had learned, if one told."""
        self.forget()

    def forget(self) -> None:
        """The prior changed: what was learned over the old one means nothing."""
        self.believed = None
        self._parts = AS_PREDICTED
        self._predicted_s = 0.0
        self._weight = self._ratio = self._second = self._third = 0.0
        self._second_square = self._third_square = self._second_third = 0.0
        self._second_ratio = self._third_ratio = 0.0

    def fade(self) -> None:
        """What was seen is half as sure."""
        self._keep(0.5)

    def learn(self, seen_s: float, first_s: float, second_s: float, third_s: float = 0.0) -> None:
        """What was predicted as ``first_s + second_s + third_s`` took ``seen_s`` seconds."""
        predicted = first_s + second_s + third_s
        second, third, ratio = second_s / predicted, third_s / predicted, seen_s / predicted
        if self._weight > LESSONS_BEFORE_OUTLIERS:
            usual = self._ratio / self._weight * self._parts.times(second, third) / self._usual_times()
            if usual > 0.0:
                ratio = min(OUTLIER * usual, max(usual / OUTLIER, ratio))
        self._keep(FORGET_PER_OBSERVATION)
        self._predicted_s += (1.0 - FORGET_PER_OBSERVATION if self._predicted_s else 1.0) * (
            predicted - self._predicted_s
        )
        weight = min(MOST_WEIGHT, predicted / self._predicted_s)
        self._weight += weight
        self._ratio += weight * ratio
        self._second += weight * second
        self._third += weight * third
        self._second_square += weight * second * second
        self._third_square += weight * third * third
        self._second_third += weight * second * third
        self._second_ratio += weight * second * ratio
        self._third_ratio += weight * third * ratio

    def fit(self, around: Parts) -> Parts:
        """The parts as lessons have them; ``around``: believed so far."""
        if self.believed is not None:
            around = self.believed
        weight = self._weight
        if not weight:
            return around
        second, third, ratio = self._second / weight, self._third / weight, self._ratio / weight
        level = ratio / around.times(second, third)
        # Spreads about the means and the ridge; right-hand sides; two equations, solved.
        aa = self._second_square - second * self._second + RIDGE_SECOND
        bb = self._third_square - third * self._third + RIDGE_THIRD
        ab = self._second_third - second * self._third
        a = self._second_ratio - second * self._ratio + RIDGE_SECOND * level * (around.second - 1.0)
        b = self._third_ratio - third * self._ratio + RIDGE_THIRD * level * (around.third - 1.0)
        whole = aa * bb - ab * ab
        slope_second = (a * bb - b * ab) / whole
        slope_third = (b * aa - a * ab) / whole
        level = max(ratio - slope_second * second - slope_third * third, FIRST_PART_AT_LEAST * ratio)
        if level <= 0.0:
            return around  # all of it took no time
        self._parts = Parts(1.0 + slope_second / level, 1.0 + slope_third / level).bounded
        return self._parts

    def level(self, factor: float, parts: Parts, others: "CostShape") -> float:
        """What the first part is to be multiplied with if the usual whole is ``factor`` times the prior.

        Of costs of two parts, as a decode step's are.
        """
        usual = others._second / others._weight if others._weight else 0.0
        second = (self._second + MEAN_OF_OTHERS * usual) / (self._weight + MEAN_OF_OTHERS)
        return factor / parts.times(second, 0.0)

    def _usual_times(self) -> float:
        return self._parts.times(self._second / self._weight, self._third / self._weight)

    def _keep(self, share: float) -> None:
        self._weight *= share
        self._ratio *= share
        self._second *= share
        self._third *= share
        self._second_square *= share
        self._third_square *= share
        self._second_third *= share
        self._second_ratio *= share
        self._third_ratio *= share
