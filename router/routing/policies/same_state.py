"""A twin of a random generator: explaining a decision must not use up the numbers of the next one."""

import random


def same_state(rng: random.Random) -> random.Random:
    """A generator that will give the numbers ``rng`` would, which stays as it is.

    >>> rng = random.Random(1)
    >>> same_state(rng).random() == rng.random()
    True
    """
    twin = random.Random()
    twin.setstate(rng.getstate())
    return twin
