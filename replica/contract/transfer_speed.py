"""What copies from one place have taken lately: a latency and a bandwidth, fitted, forgotten with time."""

from typing import Final

REFERENCE_BYTES: Final = 8_000_000.0
"""The assumed figures stand for copies of this size and of size 0."""
PRIOR_WEIGHT: Final = 0.1
"""How much each of the two counts beside a measurement."""


class TransferSpeed:
    """``seconds(n) = latency + n / bandwidth``, by weighted least squares over what was measured.

    The assumed figures count as a fifth of a measurement that never fades, so that equal sizes have an answer
    and a tier that was slow once is tried again: what was measured loses half its weight in ``half_life_s``,
    and some with every newer measurement, so that at most ``memory`` of them count.

    >>> disk = TransferSpeed(latency_s=0.0001, bytes_per_s=2e9)
    >>> round(1e3 * disk.seconds(20_000_000, now=0.0), 2)                # assumed: 0.1 + 10 ms
    10.1
    >>> for second in range(20):
    ...     disk.observe(20_000_000, 0.1, now=float(second))             # really 10 times slower
    >>> round(1e3 * disk.seconds(20_000_000, now=20.0), 0)
    100.0
    >>> round(1e3 * disk.seconds(20_000_000, now=3_600.0), 2)            # an hour later: worth another try
    10.1
    """

    __slots__ = ("_at", "_fading", "_half_life_s", "_keep", "_prior", "_reference")

    def __init__(
        self,
        latency_s: float,
        bytes_per_s: float,
        *,
        half_life_s: float = 60.0,
        memory: int = 32,
        reference: float = REFERENCE_BYTES,
    ) -> None:
        """Sizes may be of another unit than bytes, if ``reference`` is a usual size in it."""
        if latency_s < 0 or bytes_per_s <= 0:
            raise ValueError(f"latency {latency_s} s, {bytes_per_s} bytes/s: give 0 or more, and more than 0")
        self._half_life_s = half_life_s
        self._reference = reference
        self._keep = 1.0 - 1.0 / memory
        # Sums of weight, size, seconds, size squared, size times seconds; sizes in units of the reference.
        unit_s = reference / bytes_per_s
        prior = (2.0, 1.0, 2 * latency_s + unit_s, 1.0, latency_s + unit_s)
        self._prior = tuple(PRIOR_WEIGHT * total for total in prior)
        self._fading = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._at = 0.0

    def observe(self, size_bytes: int, seconds: float, now: float) -> None:
        """A copy of ``size_bytes`` took ``seconds``; or has taken that long and is not done."""
        x = size_bytes / self._reference
        kept = tuple(self._keep * total for total in self._faded(now))
        new = (1.0, x, seconds, x * x, x * seconds)
        w, sx, sy, sxx, sxy = (a + b for a, b in zip(kept, new, strict=True))
        self._fading = (w, sx, sy, sxx, sxy)
        self._at = max(self._at, now)

    def seconds(self, size_bytes: int, now: float) -> float:
        """Expected seconds of a copy of ``size_bytes`` that begins now; never less for a larger one."""
        latency_s, seconds_per_byte = self.fit(now)
        return latency_s + seconds_per_byte * size_bytes

    def fit(self, now: float) -> tuple[float, float]:
        """(latency in s, seconds per byte), both 0 or more."""
        w, sx, sy, sxx, sxy = (a + b for a, b in zip(self._prior, self._faded(now), strict=True))
        slope = max(0.0, (w * sxy - sx * sy) / (w * sxx - sx * sx))
        latency_s = (sy - slope * sx) / w
        if latency_s < 0.0:  # the best line through the origin
            latency_s, slope = 0.0, sxy / sxx
        return latency_s, slope / self._reference

    def _faded(self, now: float) -> tuple[float, ...]:
        share = 0.5 ** (max(0.0, now - self._at) / self._half_life_s)
        return tuple(share * total for total in self._fading)
