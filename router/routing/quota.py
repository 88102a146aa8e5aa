"""What one tenant may use, and what it used: here, and at the other routers as far as they told.

A limit holds for the whole fleet. Each router charges its own requests at once and those of the others when
it hears of them, some milliseconds later; so all together may exceed a rate by what is sent within that
time. Routers that cannot hear each other keep to a share of each limit (``share``).
"""

from dataclasses import dataclass

BURST_S = 1.0
"""So much of a rate may be saved up and used at once."""


@dataclass(frozen=True, slots=True)
class TenantLimits:
    """``None``: no limit."""

    requests_per_s: float | None = None
    tokens_per_s: float | None = None
    """Of prompts, cached or not, and of replies."""
    concurrent: int | None = None
    """Requests arriving, held or in flight."""


class Bucket:
    """A rate of which a second's worth can be saved up. It may go into debt, and then has to recover first.

    >>> bucket = Bucket(rate_per_s=2.0)
    >>> bucket.wait_s(0.0), bucket.take(1.0, 0.0), bucket.take(1.0, 0.0), bucket.wait_s(0.0)
    (0.0, None, None, 0.5)
    >>> bucket.wait_s(0.5), bucket.take(5.0, 0.5), bucket.wait_s(1.0)     # five more at once: -4, then -3
    (0.0, None, 2.0)
    >>> bucket.wait_s(1.0, share=0.5)                                     # one of two routers: half as fast
    4.0
    """

    __slots__ = ("_at", "_level", "rate_per_s")

    def __init__(self, rate_per_s: float) -> None:
        self.rate_per_s = rate_per_s
        self._level = max(1.0, rate_per_s * BURST_S)
        self._at = 0.0

    def _refill(self, now: float, share: float) -> None:
        rate = self.rate_per_s * share
        if now > self._at:
            self._level = min(max(1.0, rate * BURST_S), self._level + (now - self._at) * rate)
            self._at = now

    def wait_s(self, now: float, share: float = 1.0) -> float:
        """Seconds until one more may be taken; 0: now."""
        self._refill(now, share)
        return 0.0 if self._level >= 1.0 else (1.0 - self._level) / (self.rate_per_s * share)

    def take(self, amount: float, now: float, share: float = 1.0) -> None:
        """Use ``amount``; a negative one is given back."""
        self._refill(now, share)
        self._level -= amount


class Quota:
    """Changed by the events of the tenant's requests; whoever admits them asks ``refusal`` first.

    >>> quota = Quota(TenantLimits(concurrent=1))
    >>> quota.refusal(0.0), quota.began(900, 0.0), quota.refusal(0.0), quota.ended(), quota.refusal(0.0)
    (None, None, ('concurrent', 1.0), None, None)
    """

    __slots__ = (
        "_requests",
        "_tokens",
        "arriving",
        "arriving_bytes",
        "held",
        "in_flight",
        "limits",
        "peers_in_flight",
        "peers_requests",
        "peers_tokens",
        "requests",
        "share",
        "tokens",
    )

    def __init__(self, limits: TenantLimits = TenantLimits()) -> None:
        self.share = 1.0
        """Of each limit, what this router may let pass."""
        self.in_flight = 0
        """Begun here and not ended, held ones included."""
        self.held = 0
        self.arriving = 0
        """Requests whose bodies are not whole yet."""
        self.arriving_bytes = 0
        """Of those bodies."""
        self.requests = 0
        """Begun here."""
        self.tokens = 0
        """Charged here: of prompts and of replies."""
        self.peers_in_flight = 0
        self.peers_requests = 0
        self.peers_tokens = 0
        self.limits = limits
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self._buckets_made(TenantLimits())

    def _buckets_made(self, before: TenantLimits) -> None:
        limits = self.limits
        if limits.requests_per_s != before.requests_per_s:
            rate = limits.requests_per_s
            self._requests = None if rate is None else Bucket(rate)
        if limits.tokens_per_s != before.tokens_per_s:
            rate = limits.tokens_per_s
            self._tokens = None if rate is None else Bucket(rate)

    def limits_changed(self, limits: TenantLimits) -> None:
        """Other limits from now on; one that stayed as it was keeps what was used of it."""
        before, self.limits = self.limits, limits
        self._buckets_made(before)

    def refusal(self, now: float) -> tuple[str, float] | None:
        """The limit that one more request would break, and in how many seconds it may not; ``None``: none."""
        if self._full(self.in_flight):
            return "concurrent", 1.0
        for name, bucket in (("requests_per_s", self._requests), ("tokens_per_s", self._tokens)):
            if bucket is not None and (wait_s := bucket.wait_s(now, self.share)):
                return name, wait_s
        return None

    def arrival_refusal(self) -> tuple[str, float] | None:
        """The same of one whose body is still to come: it takes a place from its head on."""
        return ("concurrent", 1.0) if self._full(self.in_flight + self.arriving) else None

    def _full(self, here: int) -> bool:
        most = self.limits.concurrent
        return most is not None and here + self.peers_in_flight >= max(1, int(most * self.share))

    # --- requests of this router ----------------------------------------------------------------

    def began(self, tokens: int, now: float) -> None:
        """A request was let in; ``tokens`` of prompt and expected reply are charged. Call ``ended`` once."""
        self.in_flight += 1
        self.requests += 1
        self._charge(1, tokens, now)
        self.tokens += tokens

    def corrected(self, tokens: int, now: float) -> None:
        """It used so many more than were charged; fewer, if negative."""
        self._charge(0, tokens, now)
        self.tokens += tokens

    def ended(self) -> None:
        """It is over."""
        self.in_flight -= 1

    # --- what other routers tell ----------------------------------------------------------------

    def peer_began(self) -> None:
        """Another router holds a request or sent it. Call ``peer_ended`` once."""
        self.peers_in_flight += 1

    def peer_charged(self, requests: int, tokens: int, now: float) -> None:
        """Another router used so much."""
        self._charge(requests, tokens, now)
        self.peers_requests += requests
        self.peers_tokens += tokens

    def peer_ended(self) -> None:
        """It is over, or that router is gone."""
        self.peers_in_flight -= 1

    def _charge(self, requests: int, tokens: int, now: float) -> None:
        if self._requests is not None and requests:
            self._requests.take(float(requests), now, self.share)
        if self._tokens is not None:
            self._tokens.take(float(tokens), now, self.share)

    @property
    def unused(self) -> bool:
        """Nothing of it is in flight anywhere."""
        return not (self.arriving or self.in_flight or self.peers_in_flight)
