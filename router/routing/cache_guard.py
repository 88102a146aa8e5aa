"""Whether one more request on a replica costs others more hits than waiting costs (``hold.guard_caches``).

What a running request needs of the KV memory is pinned; the rest keeps prefixes for those to come. Where
the running ones fill most of it, hits fall, prefills grow longer, more run at once: the cache collapses. A
request that would pin n tokens for D seconds, beside a pinned ones, on a replica of C tokens whose hits save
S seconds of prefill a second, takes away::

    lost = S * D * n / (C - a - n)               seconds of prefill, its share of what is left to be hit
    wait = D / k * (1 + h)                       until one of the k running ends, for it and for the h held

and is held while ``lost > wait``. More that wait make waiting dearer, so the queue bounds itself (and one
that waits already counts twice: it goes sooner than another would be let in); with nothing running, without
hits, or beyond its deadline nobody waits for this. S is taken to fall in proportion with the room: a cache
that has more room than its prefixes need loses less, and is guarded for nothing.
Where it helps and where it does not: docs/routing.md. Off unless asked for.

Worked example: C = 400,000, a = 200,000 by 10 running, D = 8 s, S = 0.5, n = 50,000 and nobody held::

    lost = 0.5 * 8 * 50,000 / 150,000 = 1.33 s   wait = 8 / 10 = 0.8 s   held; with one held already, sent
"""

from math import exp
from typing import Final, NamedTuple

WINDOW_S: Final = 60.0


class GuardPrices(NamedTuple):
    """Seconds; of ``explain``."""

    lost_s: float
    """Prefill that others will have to do again if it is sent now."""
    wait_s: float
    """What it and those held wait if it is not."""


class CacheGuard:
    """One replica's.

    >>> guard = CacheGuard()
    >>> guard.reported(0.5)
    >>> guard.sent(saved_s=30.0, tokens=0, now=0.0)                     # half a second a second, for a minute
    >>> [round(price, 2) for price in guard.prices(50_000, 400_000, 10, held=0, decode_s=8.0, now=0.0)]
    [1.33, 0.8]
    """

    __slots__ = ("_at", "_saved", "_since_report", "_used")

    def __init__(self) -> None:
        self._used: float | None = None
        self._since_report = 0
        self._saved = 0.0
        self._at = 0.0

    def reported(self, used_share: float | None) -> None:
        """The engine told what share of its KV memory running requests hold."""
        self._used = used_share
        self._since_report = 0

    def sent(self, saved_s: float, tokens: int, now: float) -> None:
        """A request went there: its hit saves ``saved_s``, it will pin ``tokens`` more."""
        self._saved = self._faded(now) + saved_s / WINDOW_S
        self._at = now
        self._since_report += tokens

    def prices(
        self,
        tokens: int,
        capacity_tokens: int | None,
        running: int,
        *,
        held: int,
        decode_s: float,
        now: float,
    ) -> GuardPrices:
        """For a request of ``tokens``, prompt and expected reply, that decodes for ``decode_s``."""
        if not running or self._used is None or not capacity_tokens:
            return GuardPrices(0.0, 0.0)
        room = capacity_tokens * (1.0 - self._used) - self._since_report - tokens
        lost_s = self._faded(now) * decode_s * tokens / max(1.0, room)
        return GuardPrices(lost_s, decode_s / running * (1 + held))

    def _faded(self, now: float) -> float:
        return self._saved * exp((self._at - now) / WINDOW_S)
