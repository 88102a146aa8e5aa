"""How much work a shared prefix brings to those who hold it: what decides whether it deserves another home.

A spill computes a prefix a second time, which delays others, so policies price it. But when the requests that
begin with one prefix are more than its holders can do, another copy will be made anyway, and the sooner the
better: the price is waived in proportion.
"""

from math import exp
from typing import Final

HOT_AT: Final = 0.25
"""Prefill seconds per second that a prefix brings to each holder: from here on a copy is worth having."""
MAX_PREFIXES: Final = 4_096


class Heat:
    """Recent prefill work by prefix, named by the key of its last block. Forgets within ``window_s`` seconds.

    54 requests a second that need 30 ms each, all after the same prefix, on one replica, then on four:

    >>> heat = Heat(window_s=1.0)
    >>> for k in range(100):
    ...     heat.asked(7, prefill_s=0.03, now=k / 54)
    >>> round(heat.demand(7, now=100 / 54), 1), heat.demand(8, now=100 / 54)
    (1.4, 0.0)
    >>> [round(heat.price_share(7, holders, spare=0.5, now=100 / 54), 2) for holders in (1, 4)]
    [0.0, 0.32]
    """

    __slots__ = ("_prefixes", "_window_s")

    def __init__(self, window_s: float) -> None:
        self._window_s = window_s
        self._prefixes: dict[int, tuple[float, float]] = {}  # seconds of work, as of when; coldest first

    def asked(self, key: int, prefill_s: float, now: float) -> None:
        """A request begins with the prefix and needs ``prefill_s`` seconds where that is cached."""
        work = self.demand(key, now) * self._window_s + prefill_s
        prefixes = self._prefixes
        prefixes.pop(key, None)
        prefixes[key] = (work, now)
        if len(prefixes) > MAX_PREFIXES:
            del prefixes[next(iter(prefixes))]

    def demand(self, key: int, now: float) -> float:
        """Prefill seconds per second that requests after the prefix need, all holders together."""
        known = self._prefixes.get(key)
        if known is None:
            return 0.0
        work, at = known
        return work * exp((at - now) / self._window_s) / self._window_s

    def price_share(self, key: int, holders: int, spare: float, now: float) -> float:
        """The share of a copy's price that counts: 1 for a cold prefix, 0 from ``HOT_AT`` per holder on.

        ``spare``: share of the fleet's time that prefill does not fill. With nothing to spare a copy helps
        nobody.
        """
        return max(0.0, 1.0 - spare * self.demand(key, now) / (HOT_AT * holders))
