"""Lengths of made-up texts: log-normal, at least one token."""

import random
from math import log


def tokens(rng: random.Random, middle: int, spread: float) -> int:
    """A log-normal draw with median ``middle``; ``spread`` is the standard deviation of the logarithm.

    >>> [tokens(random.Random(seed), 400, 0.5) for seed in range(3)]
    [365, 542, 1190]
    """
    return max(1, round(rng.lognormvariate(log(middle), spread)))
