"""The part of a Kubernetes API server that discovery uses: one list, its watch, bookmarks, 410 and tokens."""

import asyncio
import json
import ssl
from contextlib import suppress
from typing import Any

from aiohttp import web


class FakeKubernetes:
    """Holds objects by name. A watch tells what happened since its ``resourceVersion``."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.token = "first"
        self.version = 1
        self.oldest = 0
        """Watches from before get 410."""
        self.lists: list[str] = []
        """The selector of each list that was read."""
        self.watches: list[str] = []
        """The version from which each watch began."""
        self.refused = 0
        self.url = ""
        self.port = 0
        self._log: list[tuple[int, bytes]] = []
        """Versions, and the lines that watches show of them."""
        self._changed = asyncio.Condition()
        self._open: set[asyncio.Task[Any]] = set()
        self._runner: web.AppRunner | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, with TLS if that is given."""
        app = web.Application()
        app.router.add_get("/api/v1/namespaces/prod/pods", self._answer)
        app.router.add_get("/apis/discovery.k8s.io/v1/namespaces/prod/endpointslices", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.0)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0, ssl_context=tls).start()
        self.port = self._runner.addresses[0][1]
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{self.port}"

    async def stop(self) -> None:
        """Close the port and every watch."""
        self.cut_watches()
        if self._runner is not None:
            await self._runner.cleanup()

    async def put(self, name: str, found: dict[str, Any]) -> None:
        """Add or change one object."""
        kind = "MODIFIED" if name in self.objects else "ADDED"
        self.objects[name] = found
        await self._happened(kind, self._stamped(name))

    async def delete(self, name: str) -> None:
        """Remove one object."""
        gone = self._stamped(name)
        del self.objects[name]
        await self._happened("DELETED", gone)

    async def bookmark(self) -> None:
        """Something else happened in the cluster."""
        await self._happened("BOOKMARK", {"metadata": {}})

    async def send(self, event: dict[str, Any]) -> None:
        """Whatever comes into the watches' way."""
        await self._happened(event["type"], event["object"])

    async def send_line(self, line: bytes) -> None:
        """Whatever an API server, or what stands before it, may write."""
        self.version += 1
        async with self._changed:
            self._log.append((self.version, line))
            self._changed.notify_all()

    def forget(self) -> None:
        """Compact: what happened until now can no longer be watched."""
        self.oldest = self.version

    def cut_watches(self) -> None:
        """The network breaks them."""
        for task in self._open:
            task.cancel()

    @property
    def open_watches(self) -> int:
        """Under way now, those included whose client left: that is noticed at the next event."""
        return len(self._open)

    def _stamped(self, name: str) -> dict[str, Any]:
        found = self.objects[name]
        return {**found, "metadata": {**found.get("metadata", {}), "name": name}}

    async def _happened(self, kind: str, found: dict[str, Any]) -> None:
        if "metadata" in found:
            found = {**found, "metadata": {**found["metadata"], "resourceVersion": str(self.version + 1)}}
        await self.send_line(json.dumps({"type": kind, "object": found}).encode() + b"\n")

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("authorization") != f"Bearer {self.token}":
            self.refused += 1
            return web.json_response({"kind": "Status", "code": 401}, status=401)
        if request.query.get("watch") == "1":
            return await self._watch(request, int(request.query["resourceVersion"]))
        self.lists.append(request.query["labelSelector"])
        items = [self._stamped(name) for name in self.objects]
        return web.json_response({"metadata": {"resourceVersion": str(self.version)}, "items": items})

    async def _watch(self, request: web.Request, version: int) -> web.StreamResponse:
        self.watches.append(str(version))
        if version < self.oldest:
            return web.json_response({"kind": "Status", "code": 410}, status=410)
        answer = web.StreamResponse()
        await answer.prepare(request)
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        try:
            with suppress(ConnectionError):
                while True:
                    async with self._changed:
                        await self._changed.wait_for(lambda seen=version: self.version > seen)  # type: ignore[misc]
                        news = [one for one in self._log if one[0] > version]
                        version = self.version
                    for _, line in news:
                        await answer.write(line)
        except asyncio.CancelledError:
            if request.transport is not None:
                request.transport.abort()
            raise
        finally:
            self._open.discard(task)
        return answer


def endpoint_slice(address: str, port: int, pod: str, **conditions: bool) -> dict[str, Any]:
    """An EndpointSlice of one pod."""
    return {
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port}],
        "endpoints": [
            {
                "addresses": [address],
                "conditions": {"ready": True, **conditions},
                "targetRef": {"kind": "Pod", "name": pod},
            }
        ],
    }


def pod(address: str, port: int, *, ready: bool = True, deleted: bool = False) -> dict[str, Any]:
    """A pod with two ports, of which ``http`` is a replica's."""
    return {
        "metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"} if deleted else {},
        "spec": {
            "containers": [
                {"ports": [{"name": "http", "containerPort": port}, {"name": "kv", "containerPort": 5557}]}
            ]
        },
        "status": {
            "podIP": address,
            "conditions": [{"type": "Ready", "status": "True" if ready else "False"}],
        },
    }
