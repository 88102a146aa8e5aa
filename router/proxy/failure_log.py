"""Log lines about failed requests, so many a second: a dead fleet must not bury the log.

>>> lines, times = [], [0.5] * 30 + [1.5]
>>> log = FailureLog(lambda: times.pop(0), lambda text, *args: lines.append(text % args))
>>> for number in range(31):
...     log.log("request %d failed", number)
>>> len(lines), lines[-3:]
(22, ['request 19 failed', '10 more failed requests were not logged', 'request 30 failed'])
"""

import logging
from collections.abc import Callable

LINES_PER_S = 20

logger = logging.getLogger("warmroute.proxy")


class FailureLog:
    """Writes warnings; beyond ``LINES_PER_S`` in one second it counts them and tells how many later."""

    __slots__ = ("_clock", "_left", "_second", "_suppressed", "_write")

    def __init__(self, clock: Callable[[], float], write: Callable[..., None] = logger.warning) -> None:
        self._clock = clock
        self._write = write
        self._second = -1
        self._left = 0
        self._suppressed = 0

    def log(self, text: str, *args: object) -> None:
        """One line, as ``logging`` formats it."""
        second = int(self._clock())
        if second != self._second:
            self._second, self._left = second, LINES_PER_S
            if self._suppressed:
                self._write("%d more failed requests were not logged", self._suppressed)
                self._suppressed = 0
        if self._left:
            self._left -= 1
            self._write(text, *args)
        else:
            self._suppressed += 1
