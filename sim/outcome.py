"""What became of one request, simulated or replayed: the row that every result is made from."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request from the client's side. Times are seconds."""

    sent_s: float
    """When it was sent, from the start of the run."""
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int
    """Prompt tokens whose prefill a hit saved, as the replica reported."""
    ttft_s: float | None
    """Time to the first token; ``None`` if there was none."""
    e2e_s: float
    """Time to the last token, or to the error."""
    replica: int | None = None
    """Position in the fleet; ``None`` where the router does not tell."""
    spilled: bool = False
    """Sent past a warmer replica on purpose."""
    error: str | None = None
    """Why there is no whole answer; ``None`` if there is one."""
    send_lag_s: float = 0.0
    """How much later than planned it was sent: the load generator's fault, not the fleet's."""

    @property
    def tpot_s(self) -> float | None:
        """Time per output token after the first; ``None`` with fewer than two."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.e2e_s - self.ttft_s) / (self.output_tokens - 1)
