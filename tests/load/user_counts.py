"""How many of all users there are at a share of the whole time. Pure: nothing of locust."""

STEPS = 5
SPIKE = (0.4, 0.6)
"""From and to, of the whole length."""
SPIKE_BASE = 0.25


def ramp(share: float, users: int) -> int:
    """Up in steps of equal length, the last of them whole: where the curve bends is the fleet's knee.

    >>> [ramp(share / 10, 10) for share in range(10)]
    [2, 2, 4, 4, 6, 6, 8, 8, 10, 10]
    """
    return max(1, users * (int(share * STEPS) + 1) // STEPS)


def spike(share: float, users: int) -> int:
    """A quarter of the users, all of them at once for a fifth of the time, a quarter again.

    >>> [spike(share / 10, 12) for share in range(10)]
    [3, 3, 3, 3, 12, 12, 3, 3, 3, 3]
    """
    return users if SPIKE[0] <= share < SPIKE[1] else max(1, int(users * SPIKE_BASE))
