"""Work reserved on one replica: predicted prefill until the first token, decoding until the last byte."""

from math import exp
from typing import Final

from mypy_extensions import mypyc_attr

UTILIZATION_WINDOW_S: Final = 60.0
UTILIZATION_REFRESH_S: Final = 0.25
MAX_UTILIZATION: Final = 0.95
GROSS_ERROR: Final = 3.0
"""Prefill predicted as many times too long as this is no load once that shows; smaller errors even out."""


class Speed:
    """What predictions are scaled by: 1, until something is learned (``calibration.ReplicaCost``)."""

    __slots__ = ("prefill_factor",)

    def __init__(self) -> None:
        self.prefill_factor = 1.0
        """Learned prefill time over the prior's."""


@mypyc_attr(acyclic=True)
class Booking:
    """One request's reservation. Owned by the ledger that made it."""

    __slots__ = (
        "booked_at",
        "busy_s",
        "expected_output_tokens",
        "load_s",
        "new_tokens",
        "prior_s",
        "state",
    )

    QUEUED: Final = 0
    DECODING: Final = 1
    RELEASED: Final = 2

    def __init__(
        self, load_s: float, prior_s: float, new_tokens: int, expected_output_tokens: int, booked_at: float
    ) -> None:
        self.booked_at = booked_at
        self.load_s = load_s
        """Seconds of prefill that it counts for in the replica's utilization."""
        self.prior_s = prior_s
        """Predicted prefill over the factor it was predicted with: repriced as the factor is learned."""
        self.new_tokens = new_tokens
        self.expected_output_tokens = expected_output_tokens
        self.state = Booking.QUEUED
        self.busy_s: float | None = None
        """Seconds that its prefill kept the replica busy, once known and until that was learned from."""


class Ledger:
    """What a router has sent to one replica and not yet seen finished.

    The backlog is the predicted prefill of every request without a first token, less the time since the
    last first token. It is re-based at each first token and zero when nothing is queued, so a wrong
    prediction cannot compound. What is booked is repriced when the replica's speed is learned anew.

    >>> ledger = Ledger()
    >>> first = ledger.book(prefill_s=0.6, new_tokens=9_000, expected_output_tokens=200, now=0.0)
    >>> second = ledger.book(prefill_s=0.1, new_tokens=1_500, expected_output_tokens=200, now=0.2)
    >>> round(ledger.backlog_s(0.2), 3)              # 0.7 booked, 0.2 worked off
    0.5
    >>> round(ledger.backlog_s(0.9), 3)              # both should be over, 0.2 s late: each may be as late
    0.4
    >>> ledger.first_token(first, now=0.9)           # what is left is the second's 0.1 s
    >>> round(ledger.backlog_s(0.9), 3)
    0.1
    >>> ledger.release(first, now=3.0), ledger.release(second, now=3.0), ledger.release(second, now=3.0)
    (True, True, False)
    >>> ledger.queued, ledger.decoding, ledger.outstanding_tokens, ledger.backlog_s(3.0)
    (0, 0, 0, 0.0)
    """

    __slots__ = (
        "_busy_since",
        "_done_load_s",
        "_prior_s",
        "_since",
        "_speed",
        "_utilization",
        "_utilization_at",
        "decoding",
        "in_flight",
        "load",
        "outstanding_tokens",
        "queued",
    )

    def __init__(self, speed: Speed | None = None) -> None:
        self._speed = speed or Speed()
        self.queued = 0
        self.decoding = 0
        self.in_flight = 0
        """``queued + decoding``."""
        self.outstanding_tokens = 0
        self._prior_s = 0.0
        self._since = 0.0
        """Last first token, or when the queue ceased to be empty."""
        self._busy_since = 0.0
        """When the queue ceased to be empty."""
        self._done_load_s = 0.0
        """What those that left the queue since then counted for in the utilization."""
        self.load = 0.0
        """``utilization`` as last looked at: with each booking, else by the fleet 4 times a second."""
        self._utilization = 0.0
        self._utilization_at = 0.0

    @staticmethod
    def as_read(
        queued: int, decoding: int, outstanding_tokens: int, backlog_s: float, load: float, now: float
    ) -> "Ledger":
        """One that stands like this ``now``; nothing was booked in it.

        >>> ledger = Ledger.as_read(2, 5, 9_000, backlog_s=0.4, load=0.3, now=10.0)
        >>> ledger.in_flight, ledger.load, round(ledger.backlog_s(10.1), 3)
        (7, 0.3, 0.3)
        """
        ledger = Ledger()
        ledger.queued, ledger.decoding, ledger.in_flight = queued, decoding, queued + decoding
        ledger.outstanding_tokens = outstanding_tokens
        ledger._prior_s, ledger._since = backlog_s, now
        ledger._utilization = ledger.load = load
        ledger._utilization_at = now
        return ledger

    def book(self, prefill_s: float, new_tokens: int, expected_output_tokens: int, now: float) -> Booking:
        """Reserve ``prefill_s`` seconds from ``now`` for a request that is being sent."""
        prior_s = prefill_s / self._speed.prefill_factor
        booking = Booking(prefill_s, prior_s, new_tokens, expected_output_tokens, now)
        if not self.queued:
            self._since = self._busy_since = now
            self._done_load_s = 0.0
        self._prior_s += prior_s
        self.queued += 1
        self.in_flight += 1
        self.outstanding_tokens += new_tokens + expected_output_tokens
        self.utilization(now)
        self._utilization += prefill_s / UTILIZATION_WINDOW_S
        self.load = min(self._utilization, MAX_UTILIZATION)
        return booking

    def first_token(self, booking: Booking, now: float) -> None:
        """The request's prefill is over; the backlog is re-based on what is still queued."""
        if booking.state != Booking.QUEUED:
            return
        booking.state = Booking.DECODING
        self.decoding += 1
        self.outstanding_tokens -= booking.new_tokens
        self._leave_queue(booking, now)

    def take_back(self, booking: Booking, now: float) -> None:
        """The request ends before its first token: what was not worked off of its prefill was no load.

        >>> ledger = Ledger()
        >>> booking = ledger.book(prefill_s=30.0, new_tokens=400_000, expected_output_tokens=1, now=0.0)
        >>> ledger.load, ledger.take_back(booking, now=0.0), ledger.load
        (0.5, None, 0.0)
        """
        if booking.state != Booking.QUEUED:
            return
        left_s = booking.prior_s * self._speed.prefill_factor - (now - booking.booked_at)
        if left_s > 0.0:
            booking.load_s -= left_s
            self._was_no_load(booking, left_s, now)

    def release(self, booking: Booking, now: float) -> bool:
        """The request is over, however it ended. True the first time, False after."""
        if booking.state == Booking.RELEASED:
            return False
        if booking.state == Booking.QUEUED:
            self.outstanding_tokens -= booking.new_tokens
            self._leave_queue(booking, now)
        else:
            self.decoding -= 1
        self.in_flight -= 1
        self.outstanding_tokens -= booking.expected_output_tokens
        booking.state = Booking.RELEASED
        return True

    def _leave_queue(self, booking: Booking, now: float) -> None:
        self.queued -= 1
        self._done_load_s += booking.load_s
        busy_s = now - self._busy_since
        if self._done_load_s > GROSS_ERROR * busy_s:
            self._was_no_load(booking, self._done_load_s - busy_s, now)
            self._done_load_s = busy_s
        self._since = now
        # Summing and subtracting floats drifts: an empty queue is exactly zero.
        self._prior_s = self._prior_s - booking.prior_s if self.queued else 0.0

    def _was_no_load(self, booking: Booking, seconds: float, now: float) -> None:
        """So many seconds, booked when ``booking`` was, were not worked off.

        >>> ledger = Ledger()
        >>> booking = ledger.book(prefill_s=30.0, new_tokens=400_000, expected_output_tokens=1, now=0.0)
        >>> ledger.load, ledger.first_token(booking, now=0.6), round(ledger.load, 3)
        (0.5, None, 0.01)
        """
        fresh = seconds / UTILIZATION_WINDOW_S * exp((booking.booked_at - now) / UTILIZATION_WINDOW_S)
        self.utilization(now)
        self._utilization = max(0.0, self._utilization - fresh)
        self.load = min(self._utilization, MAX_UTILIZATION)

    def backlog_s(self, now: float) -> float:
        """Seconds of prefill ahead of a request sent ``now``; 0 when nothing is queued.

        Once all that is queued should be over, each of it may be as late as the first already is: a
        replica that shows nothing does not look idle, however short its queue was predicted to be.
        """
        if not self.queued:
            return 0.0
        left = self._since + self._prior_s * self._speed.prefill_factor - now
        return left if left >= 0.0 else -left * self.queued

    @property
    def queued_prefill_s(self) -> float:
        """Predicted prefill of everything without a first token, work already done included."""
        return self._prior_s * self._speed.prefill_factor

    def late_s(self, now: float) -> float:
        """Seconds since all that is queued should have been over; 0 before, and when nothing is queued."""
        return max(0.0, now - self.free_at) if self.queued else 0.0

    def idle_s(self, now: float) -> float:
        """Seconds since nothing is queued; 0 while something is."""
        return 0.0 if self.queued else now - self._since

    @property
    def free_at(self) -> float:
        """When all that is queued will have its first token, if the predictions hold."""
        return self._since + self.queued_prefill_s

    def utilization(self, now: float) -> float:
        """Prefill seconds sent in about the last minute, per second; capped at 0.95.

        Old work fades in steps of a quarter of a second, 0.4% each, not at every look.
        """
        elapsed = now - self._utilization_at
        if elapsed > UTILIZATION_REFRESH_S:
            self._utilization *= exp(-elapsed / UTILIZATION_WINDOW_S)
            self._utilization_at = now
        self.load = load = min(self._utilization, MAX_UTILIZATION)
        return load
