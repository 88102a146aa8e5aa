"""What a policy answers: which replica, why, and the numbers that the answer can be checked with."""

from enum import StrEnum
from typing import NamedTuple


class Reason(StrEnum):
    """Why a request goes where it goes: one word per branch of a policy."""

    WARM = "warm"
    """The replica that holds most of the prompt's prefix was worth waiting for."""
    SPILL = "spill"
    """A warmer replica exists, but waiting there would cost more than its hit saves."""
    COLD = "cold"
    """No candidate holds any of the prompt; load alone decided."""
    SESSION = "session"
    """The session's home."""
    BALANCED = "balanced"
    """The policy does not look at prefixes, or no candidate was warmer than the one chosen by load."""
    ONLY = "only"
    """One candidate was left."""
    PANIC = "panic"
    """Every replica is ejected; one was tried all the same."""
    RETRY = "retry"
    """An earlier replica failed before its first byte."""


class Decision(NamedTuple):
    """The replica chosen for one request. Times are seconds and are predictions."""

    replica: int
    """Index of the replica in the fleet."""
    reason: Reason
    matched_tokens: int = 0
    """Prompt tokens believed to be cached there."""
    wait_s: float = 0.0
    """Prefill backlog ahead of this request on the chosen replica."""
    prefill_s: float = 0.0
    """Prefill of this request on the chosen replica."""
    saved_s: float = 0.0
    """Prefill the chosen replica's hit saves against a cold prefill there."""
    spill_saved_s: float | None = None
    """What staying with the warmest replica would have saved against this one (``None``: none was warmer)."""
    extra_wait_s: float | None = None
    """How much longer the warmest replica's queue was than this one's."""


class Assessment(NamedTuple):
    """What one candidate would cost one request; the rows of ``explain``. Times are seconds."""

    replica: int
    matched_tokens: int
    wait_s: float
    prefill_s: float
    imposed_s: float
    """Priced delay of others and of this request's own decoding, all that is not wait or prefill."""
    total_s: float
    """What the policy minimises."""


class NoReplica(Exception):
    """No replica may take the request. ``why`` is ``"none_usable"`` or ``"unknown_model"``."""

    def __init__(self, why: str, message: str) -> None:
        super().__init__(message)
        self.why = why
