"""What connections write in one turn of the loop waits for its end and is written in one go.

Whoever sleeps must be woken, and that costs the kernel about as much as sending does (an interrupt of another
core). A peer that was woken by a turn's first bytes is still awake when the next come, if they come at once
and not each after the router has worked on another request.
"""

import asyncio
import logging
from typing import Final

logger = logging.getLogger("warmroute.proxy")

MOST_WAITING: Final = 32
"""So many connections' bytes wait at most: the first of them waits while the router works for the others."""
SHORT_BYTES: Final = 16 * 1024
"""More than this does not wait."""
ALONE_TURNS: Final = 8
"""After so many turns in a row in which one connection wrote alone, writes do not wait for a while: a turn's
end costs 2,900 instructions, which pays where it is for several."""
AT_ONCE: Final = 8
"""So many writes do not wait then; the next one does, to see whether others have joined."""


class TurnWrites:
    """The connections of one data plane that have something to write at the end of this turn."""

    __slots__ = ("_alone", "_ends", "_waiting")

    def __init__(self) -> None:
        self._waiting: list[LateWriter] = []
        self._ends = False
        """``_end`` is going to be called."""
        self._alone = 0
        """Turns in a row in which one wrote alone, and from ``ALONE_TURNS`` on, writes that did not wait."""

    def take(self, writer: "LateWriter") -> bool:
        """``writer`` has something to write: True if it will be told to ``flush``, else it writes now."""
        if self._alone >= ALONE_TURNS:
            self._alone += 1
            if self._alone <= ALONE_TURNS + AT_ONCE:
                return False
            self._alone = ALONE_TURNS - 1
        waiting = self._waiting
        waiting.append(writer)
        if not self._ends:
            self._ends = True
            asyncio.get_running_loop().call_soon(self._end)
        if len(waiting) == MOST_WAITING:
            self.flush()
        return True

    def _end(self) -> None:
        self._ends = False
        self._alone = self._alone + 1 if len(self._waiting) == 1 else 0
        self.flush()

    def flush(self) -> None:
        """Write what waits, as before something that takes long."""
        waiting, self._waiting = self._waiting, []
        for writer in waiting:
            try:
                writer.flush()
            except Exception:
                logger.exception("a fault of the router's own")
                writer.transport.abort()


class LateWriter(asyncio.Protocol):
    """A connection that writes at the end of the turn."""

    __slots__ = ("_unsent", "_writes", "transport")

    def __init__(self, writes: TurnWrites) -> None:
        self._writes = writes
        self._unsent = b""
        self.transport: asyncio.Transport

    def write(self, data: bytes) -> None:
        """Write ``data``, mostly at the end of the turn; in the order of the calls."""
        unsent = self._unsent
        if len(unsent) + len(data) > SHORT_BYTES:
            self.flush()
            self.transport.write(data)
        elif unsent:
            self._unsent = unsent + data
        else:
            self._unsent = data
            if not self._writes.take(self):
                self.flush()

    def flush(self) -> None:
        """Write what waits: now, and before the transport is closed or told anything else."""
        unsent = self._unsent
        if unsent:
            self._unsent = b""
            self.transport.write(unsent)

    def drop_unsent(self) -> None:
        """The connection is broken: nobody gets what waits."""
        self._unsent = b""
