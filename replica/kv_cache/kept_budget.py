"""The write budget as a record on the disk it protects, so that a restart brings no new budget.

A record says what is left and when. It promises a little less than that, so that one is enough for many
blocks: a new one is due when more was granted than the one before allows for. So however a process ends, its
successor is never given what was written already. What a clock can do wrong: one that goes back refills
nothing, one that jumps ahead refills at most what may be written at once.

>>> budget = WriteBudget(2_400_000, now=0.0)                        # 100,000 at once
>>> kept = KeptBudget(budget, None, now=0.0, wall_s=1_000.0)
>>> budget.take(40_000, now=0.0), kept.due(now=0.0, wall_s=1_000.0)
(True, b'warmroute write budget 1 53750 1000.000 e86cf229\\n')
>>> budget.take(6_000, now=0.0), kept.due(now=0.0, wall_s=1_000.0)     # 54,000 are left: it still holds
(True, None)
>>> later = WriteBudget(2_400_000, now=9.0)
>>> _ = KeptBudget(later, b'warmroute write budget 1 53750 1000.000 e86cf229\\n', now=9.0, wall_s=1_001.0)
>>> round(later.left(now=9.0))                                      # a second has passed between the two
53777
"""

import math
import zlib

from replica.kv_cache.write_budget import WriteBudget

HEAD = b"warmroute write budget 1"
PROMISED_LESS = 1 / 16
"""Of what may be written at once: so much less than is left stands in a record."""


class KeptBudget:
    """A ``WriteBudget`` and its record. Times: ``now`` the budget's own, ``wall_s`` seconds since 1970."""

    def __init__(self, budget: WriteBudget, record: bytes | None, now: float, wall_s: float) -> None:
        """Goes on from ``record``; None: there never was one. A record that cannot be read leaves nothing."""
        self._budget = budget
        self._spent_bytes = budget.spent_bytes
        self._record: tuple[float, float] | None = None
        if record is None or not budget.limited:
            return
        known = _read(record)
        if known is None:
            budget.resume(0.0, now)
            return
        left_bytes, at_s = known
        budget.resume(budget.refilled(left_bytes, wall_s - at_s), now)
        if at_s <= wall_s:
            self._record = known

    def due(self, now: float, wall_s: float) -> bytes | None:
        """What must be kept before what was granted since is written; None: the last record covers it."""
        budget = self._budget
        if not budget.limited or budget.spent_bytes == self._spent_bytes:
            return None
        self._spent_bytes = budget.spent_bytes
        left = budget.left(now)
        if self._record is not None:
            promised, at_s = self._record
            if budget.refilled(promised, wall_s - at_s) <= left:
                return None
        promised = math.floor(max(0.0, left - PROMISED_LESS * budget.burst_bytes))
        at_s = math.ceil(1e3 * wall_s) / 1e3  # never sooner than it is
        self._record = (promised, at_s)
        text = b"%b %d %.3f" % (HEAD, promised, at_s)
        return b"%b %08x\n" % (text, zlib.crc32(text))

    def not_kept(self) -> None:
        """The record could not be written: with the next grant another is due."""
        self._record = None


def _read(record: bytes) -> tuple[float, float] | None:
    """Bytes left and when, or None for anything but a whole record."""
    text, _, check = record.removesuffix(b"\n").rpartition(b" ")
    words = text.removeprefix(HEAD).split()
    if not text.startswith(HEAD) or check != b"%08x" % zlib.crc32(text) or len(words) != 2:
        return None
    try:
        return float(words[0]), float(words[1])
    except ValueError:
        return None
