"""How many bytes may be written to a disk in a day, so that it lives as long as it was bought for."""

DAY_S = 86_400.0


class WriteBudget:
    """In any 24 hours at most ``bytes_per_day``; at most ``burst_bytes`` of them at once.

    A bucket of ``burst_bytes`` that refills so fast that a whole bucket and a day's refill make one day's
    budget. A drive of 1 TB rated for 0.3 drive writes a day has 300 GB:

    >>> budget = WriteBudget(300_000_000_000, now=0.0)
    >>> budget.take(12_500_000_000, now=0.0), budget.take(1_000_000, now=0.0)      # a 24th at once
    (True, False)
    >>> budget.take(3_000_000, now=1.0), budget.take(3_000_000, now=2.0)           # then 3.3 MB a second
    (True, True)
    >>> WriteBudget(None, now=0.0).take(10**15, now=0.0), WriteBudget(0, now=0.0).take(1, now=0.0)
    (True, False)
    """

    __slots__ = ("_at", "_burst_bytes", "_level", "_rate", "limited", "spent_bytes")

    def __init__(self, bytes_per_day: int | None, now: float, burst_bytes: int | None = None) -> None:
        """None: no limit. ``burst_bytes``: a 24th of the day's if not given."""
        self.limited = bytes_per_day is not None
        self.spent_bytes = 0
        """Counter: all that was granted."""
        daily = float(bytes_per_day or 0)
        self._burst_bytes = min(daily, float(burst_bytes) if burst_bytes is not None else daily / 24)
        self._rate = (daily - self._burst_bytes) / DAY_S
        self._level = self._burst_bytes
        self._at = now

    @property
    def burst_bytes(self) -> float:
        """The most that may be written at once."""
        return self._burst_bytes

    def refilled(self, left_bytes: float, seconds: float) -> float:
        """What ``left_bytes`` have become so much later; a clock that went back refills nothing."""
        return min(self._burst_bytes, left_bytes + self._rate * max(0.0, seconds))

    def left(self, now: float) -> float:
        """Bytes that may be written now."""
        return self.refilled(self._level, now - self._at)

    def resume(self, left_bytes: float, now: float) -> None:
        """Go on with what an earlier process left."""
        self._level, self._at = self.refilled(left_bytes, 0.0), now

    def take(self, size_bytes: int, now: float) -> bool:
        """Spend ``size_bytes`` if there are so many; False: nothing spent, do not write."""
        if self.limited:
            self._level, self._at = self.left(now), max(self._at, now)
            if size_bytes > self._level:
                return False
            self._level -= size_bytes
        self.spent_bytes += size_bytes
        return True
