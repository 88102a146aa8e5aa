"""Whether a tier may be used just now: one that fails is left alone for a while, longer each time."""

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 300.0


class TierHealth:
    """One way of using one tier (reading or writing).

    >>> disk = TierHealth()
    >>> disk.failed(now=10.0); disk.usable(now=10.9), disk.usable(now=11.0)
    (False, True)
    >>> disk.failed(now=11.0); disk.usable(now=12.9), disk.usable(now=13.0)       # twice as long
    (False, True)
    >>> disk.worked(); disk.failed(now=20.0); disk.usable(now=21.0)
    True
    """

    __slots__ = ("_pause_s", "_until", "failures")

    def __init__(self) -> None:
        self.failures = 0
        """Counter."""
        self._pause_s = FIRST_PAUSE_S
        self._until: float | None = None

    def usable(self, now: float) -> bool:
        """Not in a pause."""
        return self._until is None or now >= self._until

    def failed(self, now: float) -> None:
        """It did not work: full, gone, broken."""
        self.failures += 1
        if self.usable(now):  # those that began together fail together: one pause
            self._until = now + self._pause_s
            self._pause_s = min(2 * self._pause_s, LONGEST_PAUSE_S)

    def worked(self) -> None:
        """It worked: the next failure pauses shortly."""
        self._pause_s = FIRST_PAUSE_S
