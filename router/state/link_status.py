"""Whether the shared state works: one word, one log line for each change of it, and counts."""

import logging
from collections.abc import Callable
from enum import StrEnum

log = logging.getLogger("warmroute.state")

NOT_YET = "not connected yet"


class LinkState(StrEnum):
    """How far this router and the others know of each other."""

    STARTING = "starting"
    SHARING = "sharing"
    MUTE = "mute"
    """It hears the others and cannot tell them anything."""
    CUT_OFF = "cut_off"
    """It does not hear the others; it decides by what it knows itself."""


_MEANING = {
    LinkState.SHARING: "routers share what they send",
    LinkState.MUTE: "this router hears the others, they do not hear it; requests go on",
    LinkState.CUT_OFF: "this router decides by what it knows itself; requests go on",
}


class LinkStatus:
    """What the reading and the writing side last met.

    >>> status = LinkStatus("redis://127.0.0.1:6379", clock=lambda: 0.0)
    >>> status.reading(None); status.writing(None); status.state
    <LinkState.SHARING: 'sharing'>
    >>> status.writing("its memory is full", answered=True); status.state
    <LinkState.MUTE: 'mute'>
    >>> status.writing("no answer in time"); status.state, status.fault, status.changes
    (<LinkState.CUT_OFF: 'cut_off'>, 'no answer in time', 3)
    """

    __slots__ = (
        "_changed",
        "_clock",
        "_read_fault",
        "_where",
        "_write_fault",
        "_write_refused",
        "changes",
        "since",
        "state",
    )

    def __init__(
        self,
        where: str,
        clock: Callable[[], float],
        changed: Callable[[LinkState], None] = lambda state: None,
    ) -> None:
        """``where``: the store's address, without secrets, for the log."""
        self._where = where
        self._clock = clock
        self._changed = changed
        self._read_fault: str | None = NOT_YET
        self._write_fault: str | None = NOT_YET
        self._write_refused = False
        self.state = LinkState.STARTING
        self.since = clock()
        self.changes = 0

    @property
    def fault(self) -> str | None:
        """What is wrong; ``None`` while all is well."""
        faults = [fault for fault in (self._read_fault, self._write_fault) if fault is not None]
        return min(faults, key=lambda fault: fault == NOT_YET, default=None)

    def reading(self, fault: str | None) -> None:
        """The reading side works (``None``) or failed."""
        if fault != self._read_fault:
            self._read_fault = fault
            self._look(failed=fault is not None)

    def writing(self, fault: str | None, *, answered: bool = False) -> None:
        """The writing side works (``None``) or failed; ``answered``: the store said no, and can be read."""
        if fault != self._write_fault:
            self._write_fault, self._write_refused = fault, answered
            self._look(failed=fault is not None)

    def _look(self, *, failed: bool) -> None:
        if self._read_fault is None and self._write_fault is None:
            state = LinkState.SHARING
        elif self.state is LinkState.STARTING and not failed:
            return  # the other side is about to follow
        elif self._read_fault is None and self._write_refused:
            state = LinkState.MUTE
        else:
            state = LinkState.CUT_OFF
        if state is self.state:
            return
        self.state, self.since = state, self._clock()
        self.changes += 1
        if state is LinkState.SHARING:
            log.info("shared state in %s: %s", self._where, _MEANING[state])
        else:
            log.warning("shared state in %s: %s: %s", self._where, self.fault, _MEANING[state])
        self._changed(state)
