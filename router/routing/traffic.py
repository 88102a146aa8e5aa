"""What the traffic is like: arrivals, reply lengths, allowed first tokens; the prices are made of these."""

from math import exp
from typing import Final

ARRIVALS_WINDOW_S: Final = 20.0
AVERAGE_OVER_REQUESTS: Final = 200


class Traffic:
    """Running averages over the fleet's requests.

    κ, the price of a second of decoding in seconds of time to first token, is the ratio of what the SLOs
    allow for each. First tokens in 1 s + a cold prefill of 0.5 s, replies of 340 tokens in 1 s + 50 ms each:

    >>> traffic = Traffic(slo_ttft_s=1.0, slo_tpot_s=0.05, expected_output_tokens=340.0)
    >>> for second in range(2_000):
    ...     traffic.arrived(float(second), cold_prefill_s=0.5)
    >>> round(traffic.decode_price, 3), round(traffic.arrivals_per_s(2_000.0), 1)
    (0.083, 1.0)
    """

    __slots__ = (
        "_allowed_ttft_s",
        "_arrivals",
        "_arrivals_at",
        "_slo_tpot_s",
        "_slo_ttft_s",
        "output_tokens",
    )

    def __init__(self, slo_ttft_s: float, slo_tpot_s: float, expected_output_tokens: float) -> None:
        self._slo_ttft_s = slo_ttft_s
        self._slo_tpot_s = slo_tpot_s
        self._allowed_ttft_s = slo_ttft_s
        self._arrivals = 0.0
        self._arrivals_at = 0.0
        self.output_tokens = expected_output_tokens
        """Mean reply length."""

    def slo_changed(self, slo_ttft_s: float, slo_tpot_s: float) -> None:
        """The operator promises something else; what was seen of the traffic stays."""
        self._allowed_ttft_s += slo_ttft_s - self._slo_ttft_s
        self._slo_ttft_s, self._slo_tpot_s = slo_ttft_s, slo_tpot_s

    def arrived(self, now: float, cold_prefill_s: float) -> None:
        """A request came in; ``cold_prefill_s`` is what its prompt takes with nothing cached."""
        elapsed = now - self._arrivals_at
        if elapsed > 0.0:
            self._arrivals *= exp(-elapsed / ARRIVALS_WINDOW_S)
            self._arrivals_at = now
        self._arrivals += 1.0
        allowed = self._slo_ttft_s + cold_prefill_s
        self._allowed_ttft_s += (allowed - self._allowed_ttft_s) / AVERAGE_OVER_REQUESTS

    @property
    def allowed_ttft_s(self) -> float:
        """Mean allowed time to first token."""
        return self._allowed_ttft_s

    def resumed(self, output_tokens: float, allowed_ttft_s: float) -> None:
        """Take up the averages of another router, or of before a restart."""
        if 0.0 < output_tokens < float("inf") and 0.0 < allowed_ttft_s < float("inf"):
            self.output_tokens, self._allowed_ttft_s = output_tokens, allowed_ttft_s

    def replied(self, output_tokens: int) -> None:
        """A reply had ``output_tokens`` tokens."""
        self.output_tokens += (output_tokens - self.output_tokens) / AVERAGE_OVER_REQUESTS

    def expected_output_tokens(self, limit: int | None) -> float:
        """Tokens a reply is expected to have that may have ``limit`` (``None`` or 0: no limit)."""
        return min(self.output_tokens, float(limit)) if limit else self.output_tokens

    def arrivals_per_s(self, now: float) -> float:
        """Requests per second over about the last 20 s."""
        return self._arrivals * exp((self._arrivals_at - now) / ARRIVALS_WINDOW_S) / ARRIVALS_WINDOW_S

    @property
    def decode_price(self) -> float:
        """κ."""
        return self._allowed_ttft_s / (self._slo_ttft_s + self._slo_tpot_s * self.output_tokens)
