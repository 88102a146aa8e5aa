"""A source of replicas: what finds them, and how it tells that it cannot."""

import asyncio
import logging
from collections.abc import Callable
from typing import Protocol

from router.replica_config import ReplicaConfig

log = logging.getLogger("warmroute.discovery")

Found = Callable[[tuple[ReplicaConfig, ...]], None]
"""Called with all replicas of a source, whenever it has an answer."""


class SourceStatus:
    """Whether a source can find replicas at present. Each change is one log line."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.heard = asyncio.Event()
        """Set when it has found, or failed to find, for the first time."""
        self.failure: str | None = None
        """Why it cannot; what it found before stays meanwhile."""

    def failed(self, why: str) -> None:
        """It cannot. The same reason again is not logged again."""
        if why != self.failure:
            log.warning("%s: %s. What was found before stays", self.label, why)
        self.failure = why
        self.heard.set()

    def well(self) -> None:
        """It can."""
        if self.failure is not None:
            log.info("%s: works again", self.label)
        self.failure = None
        self.heard.set()


class Source(Protocol):
    """One entry of ``discovery:`` at work."""

    async def watch(self, found: Found, status: SourceStatus) -> None:
        """Tell ``found`` what there is and every change of it, until cancelled."""
