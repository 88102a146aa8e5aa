"""Replicas from Kubernetes: the list is read, then watched, and read again every now and then."""

import asyncio
import ssl
from typing import Any

import aiohttp

from router.discovery.endpoints import Endpoint, PortUnknown, distinct, ready_in_slice, ready_pod
from router.discovery.kubernetes_api import ApiError, GoneError, ObjectList
from router.discovery.source import Found, SourceStatus
from router.discovery_config import KubernetesDiscovery

_PAUSES_S = (0.2, 1.0, 3.0, 10.0)
"""After the first, second, … failure in a row."""
_NOT_UNDERSTOOD = (ValueError, KeyError, TypeError, AttributeError)
"""What reading JSON of another form raises."""
_QUIET_S = 1.0
"""After a watch that told nothing: something between may close them as soon as they are open."""


class KubernetesSource:
    """One service, or the pods with certain labels."""

    def __init__(self, config: KubernetesDiscovery) -> None:
        """Raises ``ConfigError`` if it cannot be told where the API server is."""
        self._config = config
        self._list = ObjectList(config)
        self._ready = ready_in_slice if config.service is not None else ready_pod
        self._objects: dict[str, dict[str, Any]] = {}
        """By name."""
        self._failures = 0

    async def watch(self, found: Found, status: SourceStatus) -> None:
        """As ``Source`` says."""
        while True:
            try:
                async with self._list.session() as session:
                    await self._follow(session, found, status)
            except GoneError:
                pass
            except (ApiError, aiohttp.ClientError, OSError, ssl.SSLError, *_NOT_UNDERSTOOD) as error:
                status.failed(_reason(error))
            else:
                continue  # time to read the whole list again
            await self._pause()

    async def _follow(self, session: aiohttp.ClientSession, found: Found, status: SourceStatus) -> None:
        """Read the list, then watch it until it is time to read it again."""
        objects, version = await self._list.read(session)
        self._objects = {one["metadata"]["name"]: one for one in objects}
        self._tell(found, status)
        try:
            async with asyncio.timeout(self._config.resync_s) as resync:
                while True:
                    version = await self._watch(session, version, found, status)
        except TimeoutError:
            if not resync.expired():  # the watch's own limit: a connection that died in silence
                raise

    async def _watch(
        self, session: aiohttp.ClientSession, version: str, found: Found, status: SourceStatus
    ) -> str:
        """Watch from ``version`` on; where to go on when the server, or the network, has ended it."""
        began = version
        async for kind, one in self._list.changes(session, version):
            self._failures = 0
            version = one["metadata"]["resourceVersion"]
            if kind == "DELETED":
                self._objects.pop(one["metadata"]["name"], None)
            elif kind in ("ADDED", "MODIFIED"):
                self._objects[one["metadata"]["name"]] = one
            if kind != "BOOKMARK":
                self._tell(found, status)
        if version == began:
            await asyncio.sleep(_QUIET_S)
        return version

    def _tell(self, found: Found, status: SourceStatus) -> None:
        endpoints: list[Endpoint] = []
        unknown: str | None = None
        for one in self._objects.values():
            try:
                endpoints += self._ready(one, self._config.port)
            except PortUnknown as error:
                unknown = f"{one['metadata']['name']}: {error}"
        if unknown is None:
            status.well()
        else:
            status.failed(unknown)
        replica_at = self._config.replica_at
        found(tuple(replica_at(one.host, one.port, one.name) for one in distinct(endpoints)))

    async def _pause(self) -> None:
        """Longer each time, until the watch tells something."""
        pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        await asyncio.sleep(pause_s)


def _reason(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "the API server does not answer"
    if isinstance(error, _NOT_UNDERSTOOD) and not isinstance(error, OSError):
        return f"the API server's answer is not understood ({type(error).__name__}: {error})"
    return str(error) or type(error).__name__
