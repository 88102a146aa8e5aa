"""Work reserved on one replica: predicted prefill until the first token, decoding until the last byte."""

from math import exp

UTILIZATION_WINDOW_S = 60.0
UTILIZATION_REFRESH_S = 0.25
MAX_UTILIZATION = 0.95
IDLE = float("-inf")


class Booking:
    """One request's reservation. Owned by the ledger that made it."""

    __slots__ = ("booked_at", "expected_output_tokens", "new_tokens", "prefill_s", "state")

    QUEUED, DECODING, RELEASED = 0, 1, 2

    def __init__(self, prefill_s: float, new_tokens: int, expected_output_tokens: int, now: float) -> None:
        self.prefill_s = prefill_s
        self.new_tokens = new_tokens
        self.expected_output_tokens = expected_output_tokens
        self.booked_at = now
        self.state = Booking.QUEUED


class Ledger:
    """What a router has sent to one replica and not yet seen finished.

    The backlog is the predicted prefill of every request without a first token, less the time the
    replica has already worked. It is re-based at each first token and zero when nothing is queued, so a
    wrong prediction cannot compound.

    >>> ledger = Ledger()
    >>> first = ledger.book(prefill_s=0.6, new_tokens=9_000, expected_output_tokens=200, now=0.0)
    >>> second = ledger.book(prefill_s=0.1, new_tokens=1_500, expected_output_tokens=200, now=0.2)
    >>> round(ledger.backlog_s(0.2), 3)              # 0.7 booked, 0.2 worked off
    0.5
    >>> ledger.first_token(first, now=0.7)           # 0.1 s late: what is left is the second's 0.1 s
    >>> round(ledger.backlog_s(0.7), 3)
    0.1
    >>> ledger.release(first, now=3.0), ledger.release(second, now=3.0), ledger.release(second, now=3.0)
    (True, True, False)
    >>> ledger.queued, ledger.decoding, ledger.outstanding_tokens, ledger.backlog_s(3.0)
    (0, 0, 0, 0.0)
    """

    __slots__ = (
        "_queued_prefill_s",
        "_utilization",
        "_utilization_at",
        "decoding",
        "free_at",
        "in_flight",
        "load",
        "outstanding_tokens",
        "queued",
    )

    def __init__(self) -> None:
        self.queued = 0
        self.decoding = 0
        self.in_flight = 0
        """``queued + decoding``."""
        self.outstanding_tokens = 0
        self.free_at = IDLE
        """When the queued prefill will be done, if the predictions hold; far in the past when idle."""
        self._queued_prefill_s = 0.0
        self.load = 0.0
        """``utilization`` as last looked at: with each booking, else by the fleet 4 times a second."""
        self._utilization = 0.0
        self._utilization_at = 0.0

    def book(self, prefill_s: float, new_tokens: int, expected_output_tokens: int, now: float) -> Booking:
        """Reserve ``prefill_s`` seconds from ``now`` for a request that is being sent."""
        booking = Booking(prefill_s, new_tokens, expected_output_tokens, now)
        self.queued += 1
        self.in_flight += 1
        self.outstanding_tokens += new_tokens + expected_output_tokens
        self._queued_prefill_s += prefill_s
        self.free_at = (self.free_at if self.free_at > now else now) + prefill_s
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
        if self.queued:
            self._queued_prefill_s -= booking.prefill_s
            self.free_at = now + self._queued_prefill_s
        else:  # summing and subtracting floats drifts: an empty queue is exactly zero
            self._queued_prefill_s = 0.0
            self.free_at = IDLE

    def backlog_s(self, now: float) -> float:
        """Seconds of prefill ahead of a request sent ``now``; 0 when nothing is queued.

        When what is queued should long be over, expect to wait as long again as it is late already: a
        replica that shows nothing does not look idle.
        """
        if not self.queued:
            return 0.0
        return abs(self.free_at - now)

    @property
    def queued_prefill_s(self) -> float:
        """Predicted prefill of everything without a first token, work already done included."""
        return self._queued_prefill_s

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
