"""Means of a few paired runs and how far they may be trusted: 95% confidence intervals of Student's t."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp, log, sqrt

_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_NORMAL_975 = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and half the width of its 95% confidence interval; ``None`` from a single run."""

    mean: float
    half_width: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Of independent runs. Raises ValueError for none.

    >>> estimate([1.0, 2.0, 3.0])
    Estimate(mean=2.0, half_width=2.48433820832296)
    >>> estimate([5.0])
    Estimate(mean=5.0, half_width=None)
    """
    count = len(values)
    if not count:
        raise ValueError("no run to take a mean of")
    mean = sum(values) / count
    if count == 1:
        return Estimate(mean, None)
    deviation = sqrt(sum((value - mean) ** 2 for value in values) / (count - 1))
    quantile = _T_975[count - 2] if count - 2 < len(_T_975) else _NORMAL_975
    return Estimate(mean, quantile * deviation / sqrt(count))


def paired_ratio(values: Sequence[float], reference: Sequence[float]) -> Estimate | None:
    """How much larger ``values`` are than ``reference``, seed by seed, as a share.

    The mean of the logarithms' differences, so that twice and half cancel; the interval is theirs. ``None``
    if some value is not positive.

    >>> made = paired_ratio([2.2, 1.1], [2.0, 1.0])
    >>> made is not None and round(made.mean, 3)
    0.1
    """
    if any(value <= 0.0 for value in (*values, *reference)):
        return None
    logs = estimate([log(value / base) for value, base in zip(values, reference, strict=True)])
    mean = exp(logs.mean) - 1.0
    if logs.half_width is None:
        return Estimate(mean, None)
    return Estimate(mean, (exp(logs.half_width) - 1.0) * exp(logs.mean))


def paired_difference(values: Sequence[float], reference: Sequence[float]) -> Estimate:
    """How much larger ``values`` are than ``reference``, seed by seed."""
    return estimate([value - base for value, base in zip(values, reference, strict=True)])
