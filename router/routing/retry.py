"""May this failure be tried again elsewhere: never after the first byte, and only within a budget."""

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final


class Failure(Enum):
    """How an attempt on a replica ended without an answer the client can use."""

    CONNECT = auto()
    """No connection: nothing was sent."""
    NO_SOCKET = auto()
    """This router had no file descriptor or port left for a connection: no replica's fault."""
    CLOSED = auto()
    """The connection broke before the first byte of an answer."""
    STATUS_5XX = auto()
    """The replica answered 500, 502, 503 or 504 (503 and 429 say "busy": see ``BUSY``)."""
    BUSY = auto()
    """The replica answered 429, or 503 with Retry-After: alive, full."""
    FIRST_BYTE_TIMEOUT = auto()
    """No first byte in time; what the replica did with the request is unknown."""
    SILENT = auto()
    """While the request waited for its first byte, the replica stopped answering its probes."""
    BROKEN = auto()
    """The transfer broke or stalled after the first byte."""
    GARBAGE = auto()
    """What came was not HTTP."""


RETRYABLE = frozenset(
    {
        Failure.CONNECT,
        Failure.CLOSED,
        Failure.STATUS_5XX,
        Failure.BUSY,
        Failure.SILENT,
        Failure.GARBAGE,
    }
)


def failure_of_status(status: int, *, retry_after: bool) -> Failure | None:
    """What an error status says about the replica; ``None``: it is well, the request is at fault.

    >>> failure_of_status(503, retry_after=True) is Failure.BUSY, failure_of_status(400, retry_after=False)
    (True, None)
    """
    if status == 429 or (status == 503 and retry_after):
        return Failure.BUSY
    return Failure.STATUS_5XX if status in (500, 502, 503, 504) else None


MOST_REST_S: Final = 30.0
DATED_REST_S: Final = 1.0


def rest_s(retry_after: bytes | None) -> float:
    """Seconds a busy replica wants to be left alone, by its ``Retry-After`` if it has one.

    >>> rest_s(b"7"), rest_s(None), rest_s(b"86400"), rest_s(b"Fri, 31 Dec 1999 23:59:59 GMT")
    (7.0, 0.0, 30.0, 1.0)
    """
    if retry_after is None:
        return 0.0  # a slot may be free in a moment
    if not retry_after.isdigit():
        return DATED_REST_S
    return MOST_REST_S if len(retry_after) > 4 else min(MOST_REST_S, float(retry_after))


@dataclass(frozen=True, slots=True)
class RetrySettings:
    """How often failures may be tried again."""

    attempts: int = 3
    """Replicas one request may be sent to in all."""
    budget_share: float = 0.2
    """Retries allowed per request in the long run, so that a brown-out is not amplified."""
    budget_floor: int = 100
    """Retries in hand at the start and after a quiet time: enough for one replica's death."""


class RetryBudget:
    """Tokens earned by requests, spent by retries. A connection never made costs none: it cost nothing.

    >>> budget = RetryBudget(RetrySettings(attempts=2, budget_share=0.5, budget_floor=1))
    >>> budget.take(Failure.CLOSED, attempts_made=1), budget.take(Failure.CLOSED, attempts_made=1)
    (True, False)
    >>> budget.earn(); budget.earn(); budget.take(Failure.CLOSED, attempts_made=1)
    True
    >>> budget.take(Failure.BROKEN, attempts_made=1), budget.take(Failure.CONNECT, attempts_made=2)
    (False, False)
    """

    __slots__ = ("_settings", "_tokens")

    def __init__(self, settings: RetrySettings) -> None:
        self._settings = settings
        self._tokens = float(settings.budget_floor)

    def earn(self) -> None:
        """A request came in."""
        self._tokens = min(float(self._settings.budget_floor), self._tokens + self._settings.budget_share)

    def take(self, failure: Failure, attempts_made: int) -> bool:
        """May a request that failed so, after ``attempts_made`` attempts, be tried on another replica?"""
        if failure not in RETRYABLE or attempts_made >= self._settings.attempts:
            return False
        if failure is Failure.CONNECT:
            return True
        if self._tokens < 1.0:
            return False
        self._tokens -= 1.0
        return True
