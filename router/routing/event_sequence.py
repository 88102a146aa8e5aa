"""The numbers on a publisher's batches: which comes next, what was missed, what was seen before.

A publisher counts its batches from 0. ZMQ's PUB drops what a slow or late subscriber cannot take, replays
bring batches twice, and an engine that restarts counts from 0 again. A number that was seen before is told
from a restart by the batch's own time: the same batch again has the same one.
"""

from collections import OrderedDict
from enum import Enum, auto

REMEMBERED = 1_024


class Verdict(Enum):
    """What a batch is to us."""

    NEXT = auto()
    """Apply it."""
    DUPLICATE = auto()
    """It was applied already."""
    GAP = auto()
    """Batches before it are missing."""
    RESTART = auto()
    """The publisher began anew: nothing it told before counts."""


class EventSequence:
    """One publisher's numbers.

    >>> sequence = EventSequence()
    >>> sequence.judge(0, timestamp_s=10.0)
    <Verdict.NEXT: 1>
    >>> sequence.applied(0, 10.0)
    >>> sequence.judge(2, 12.0), sequence.missing_before(2)
    (<Verdict.GAP: 3>, 1)
    >>> sequence.judge(0, 10.0), sequence.judge(0, 13.0)
    (<Verdict.DUPLICATE: 2>, <Verdict.RESTART: 4>)
    """

    __slots__ = ("_latest_s", "_seen", "next")

    def __init__(self) -> None:
        self.next = 0
        """The number after the last one applied."""
        self._seen: OrderedDict[int, float] = OrderedDict()
        self._latest_s = float("-inf")

    def judge(self, seq: int, timestamp_s: float) -> Verdict:
        """What the batch is; changes nothing."""
        if seq == self.next:
            return Verdict.NEXT
        if seq > self.next:
            return Verdict.GAP
        seen_s = self._seen.get(seq)
        if seen_s is not None:
            return Verdict.DUPLICATE if seen_s == timestamp_s else Verdict.RESTART
        # Long ago, or skipped as lost. A first batch is never late by that much.
        return Verdict.RESTART if seq == 0 or timestamp_s > self._latest_s else Verdict.DUPLICATE

    def missing_before(self, seq: int) -> int:
        """Batches between the last one applied and ``seq``."""
        return max(0, seq - self.next)

    def applied(self, seq: int, timestamp_s: float) -> None:
        """The batch was applied, or its content is lost for good; the next is ``seq + 1``."""
        self.next = seq + 1
        self._latest_s = max(self._latest_s, timestamp_s)
        self._seen[seq] = timestamp_s
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)

    def skipped_to(self, seq: int) -> None:
        """Everything before ``seq`` that is missing is given up."""
        self.next = max(self.next, seq)

    def restarted(self) -> None:
        """The publisher counts from 0 again."""
        self.next = 0
        self._seen.clear()
        self._latest_s = float("-inf")
