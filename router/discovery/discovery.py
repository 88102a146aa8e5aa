"""All sources of one router: one task per entry of ``discovery:``, and what each found last."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from router.discovery.dns_source import DnsSource
from router.discovery.file_source import FileSource
from router.discovery.kubernetes_source import KubernetesSource
from router.discovery.source import Source, SourceStatus
from router.discovery_config import DiscoveryConfig, DnsDiscovery, FileDiscovery
from router.ended_tasks import end_tasks
from router.replica_config import ReplicaConfig

FIRST_ANSWERS_S = 5.0
"""A router that starts waits so long for what its sources find."""
_AFTER_FAULT_S = 5.0

log = logging.getLogger("warmroute.discovery")


def make_source(config: DiscoveryConfig) -> Source:
    """The source that ``config`` describes. Raises ``ConfigError``."""
    if isinstance(config, FileDiscovery):
        return FileSource(config)
    if isinstance(config, DnsDiscovery):
        return DnsSource(config)
    return KubernetesSource(config)


@dataclass(frozen=True, slots=True)
class SourceReport:
    """How one source stands."""

    source: str
    replicas: int
    """Found last, those refused included."""
    failure: str | None
    """Why it cannot find any at present."""


@dataclass(slots=True, eq=False)
class Running:
    """One entry of ``discovery:``, its source, and what that found last."""

    config: DiscoveryConfig
    source: Source
    status: SourceStatus
    replicas: tuple[ReplicaConfig, ...] = ()
    task: asyncio.Task[None] | None = None


class Discovery:
    """What the sources found last; a source that fails keeps it."""

    def __init__(self, changed: Callable[[], None]) -> None:
        """``changed``: called when some source found something else."""
        self._changed = changed
        self._running: Sequence[Running] = ()
        self._ended: set[asyncio.Task[None]] = set()

    @property
    def running(self) -> Sequence[Running]:
        """In the order of the config."""
        return self._running

    def report(self) -> list[SourceReport]:
        """How each source stands."""
        return [
            SourceReport(one.config.label, len(one.replicas), one.status.failure) for one in self._running
        ]

    async def start(self, configs: Iterable[DiscoveryConfig]) -> None:
        """Begin; returns when each source has answered or failed once, or after ``FIRST_ANSWERS_S``.

        Raises ``ConfigError``.
        """
        self.use(self.prepared(configs))
        waiting = [asyncio.ensure_future(one.status.heard.wait()) for one in self._running]
        if waiting:
            _, late = await asyncio.wait(waiting, timeout=FIRST_ANSWERS_S)
            for one in late:
                one.cancel()

    def prepared(self, configs: Iterable[DiscoveryConfig]) -> list[Running]:
        """What ``use`` is to be given; nothing changes yet. Raises ``ConfigError``.

        What a source had found stays until the one that takes its place has answered.
        """
        before = {one.config.label: one for one in self._running}
        prepared = []
        for config in configs:
            one = before.get(config.label)
            if one is None or one.config != config:
                found = () if one is None else one.replicas
                one = Running(config, make_source(config), SourceStatus(config.label), found)
            prepared.append(one)
        return prepared

    def use(self, prepared: Sequence[Running]) -> None:
        """Watch these, and no others."""
        for one in self._running:
            if one not in prepared:
                self._end(one)
        self._running = prepared
        for one in prepared:
            if one.task is None:
                one.task = asyncio.create_task(self._watch(one), name=f"discovery {one.config.label}")

    async def stop(self) -> None:
        """End all sources."""
        for one in self._running:
            self._end(one)
        self._running = ()
        await end_tasks(self._ended)

    def _end(self, one: Running) -> None:
        if one.task is not None:
            one.task.cancel()
            self._ended.add(one.task)
            one.task.add_done_callback(self._ended.discard)

    async def _watch(self, one: Running) -> None:
        def found(replicas: tuple[ReplicaConfig, ...]) -> None:
            if replicas != one.replicas:
                one.replicas = replicas
                self._changed()

        while True:
            try:
                await one.source.watch(found, one.status)
            except Exception as error:
                why = f"fault, see the log: {type(error).__name__}"
                if why != one.status.failure:
                    log.exception("%s: fault; what was found before stays", one.config.label)
                one.status.failure = why
                one.status.heard.set()
            await asyncio.sleep(_AFTER_FAULT_S)
