"""A trace: what was asked for, when, and which prompts begin alike. No text, no answers."""

from dataclasses import dataclass


class TraceError(ValueError):
    """A trace that cannot be used; the message says file, line, what was found and what was expected."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace.

    ``block_ids[i]`` names full prompt block ``i`` together with everything before it, as an unsigned 64-bit
    number; a last partial block has no id.
    """

    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...]
    timestamp_ms: float | None = None
    """Arrival on the trace's clock; ``None`` in traces without times."""
    session: str | None = None
    """Turns of one session follow one another: each starts after the answer to the one before."""
    think_ms: float | None = None
    """Pause between the answer before and this turn, where the trace tells it."""
    output_block_ids: tuple[int, ...] = ()
    """Of the block in which the prompt ends and those after it, once the answer has filled them; empty where
    nothing tells what was answered: then no later prompt can hit these."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival (timed), or session by session and turn by turn (closed loop)."""

    name: str
    block_tokens: int
    """Tokens in one block of ``block_ids``."""
    requests: tuple[TraceRequest, ...]
    remarks: tuple[str, ...] = ()
    """What reading it had to change or found strange, for whoever uses it."""

    @property
    def in_sessions(self) -> bool:
        """Turns wait for the answer before them; otherwise requests come at their own time."""
        return bool(self.requests) and self.requests[0].session is not None

    def head(self, requests: int | None) -> "Trace":
        """The first ``requests`` requests, or all of them."""
        if requests is None or requests >= len(self.requests):
            return self
        return Trace(self.name, self.block_tokens, self.requests[:requests], self.remarks)
