"""What a policy answers: which replica, why, and the numbers that the answer can be checked with."""

from enum import StrEnum
from typing import NamedTuple

from mypy_extensions import mypyc_attr

from router.routing.kv_route import KvRoute


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
    """Load decided: the policy does not look at prefixes, or what is cached elsewhere is what most of the
    traffic begins with."""
    ONLY = "only"
    """One candidate was left."""
    PANIC = "panic"
    """No replica is known to be well; one was tried all the same."""
    HANDOFF = "handoff"
    """A prefill replica has computed the prompt; this one pulls its KV and answers."""
    RETRY = "retry"
    """An earlier replica failed before its first byte."""


@mypyc_attr(acyclic=True)
class Decision:
    """The replica chosen for one request. Times are seconds and are predictions. Never changed.

    >>> decision = Decision(3, Reason.COLD, wait_s=0.5)
    >>> decision.replica, decision.because(Reason.RETRY).reason, decision.because(Reason.COLD) == decision
    (3, <Reason.RETRY: 'retry'>, True)
    """

    __slots__ = (
        "extra_wait_s",
        "matched_tokens",
        "prefill_s",
        "reason",
        "replica",
        "route",
        "saved_s",
        "spill_saved_s",
        "wait_s",
    )

    def __init__(
        self,
        replica: int,
        reason: Reason,
        matched_tokens: int = 0,
        wait_s: float = 0.0,
        prefill_s: float = 0.0,
        saved_s: float = 0.0,
        spill_saved_s: float | None = None,
        extra_wait_s: float | None = None,
        route: KvRoute | None = None,
    ) -> None:
        self.replica = replica
        """Index of the replica in the fleet."""
        self.reason = reason
        self.matched_tokens = matched_tokens
        """Prompt tokens believed to be cached there."""
        self.wait_s = wait_s
        """Prefill backlog ahead of this request on the chosen replica."""
        self.prefill_s = prefill_s
        """Prefill of this request on the chosen replica."""
        self.saved_s = saved_s
        """Prefill the chosen replica's hit saves against a cold prefill there."""
        self.spill_saved_s = spill_saved_s
        """What staying with the warmest would have saved against this one; ``None``: none was warmer."""
        self.extra_wait_s = extra_wait_s
        """How much longer the warmest replica's queue was than this one's."""
        self.route = route
        """How the KV comes there; ``None`` in a fleet that moves none."""

    def because(self, reason: Reason) -> "Decision":
        """The same decision for another ``reason``."""
        return self._like(reason, self.matched_tokens, self.prefill_s, self.route)

    def routed(
        self, route: KvRoute, *, matched_tokens: int | None = None, prefill_s: float | None = None
    ) -> "Decision":
        """The same decision with its KV coming by ``route``, and what that changes."""
        return self._like(
            self.reason,
            self.matched_tokens if matched_tokens is None else matched_tokens,
            self.prefill_s if prefill_s is None else prefill_s,
            route,
        )

    def found_less(self, matched_tokens: int, prefill_s: float) -> "Decision":
        """The same decision where less is cached than was believed."""
        return Decision(
            self.replica,
            self.reason,
            matched_tokens,
            self.wait_s,
            prefill_s,
            max(0.0, self.saved_s - (prefill_s - self.prefill_s)),
            self.spill_saved_s,
            self.extra_wait_s,
            self.route,
        )

    def _like(
        self, reason: Reason, matched_tokens: int, prefill_s: float, route: KvRoute | None
    ) -> "Decision":
        return Decision(
            self.replica,
            reason,
            matched_tokens,
            self.wait_s,
            prefill_s,
            self.saved_s,
            self.spill_saved_s,
            self.extra_wait_s,
            route,
        )

    def _values(self) -> tuple[object, ...]:
        return (
            self.replica,
            self.reason,
            self.matched_tokens,
            self.wait_s,
            self.prefill_s,
            self.saved_s,
            self.spill_saved_s,
            self.extra_wait_s,
            self.route,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Decision) and self._values() == other._values()

    def __hash__(self) -> int:
        return hash(self._values())

    def __repr__(self) -> str:
        return f"Decision{self._values()}"


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
