"""Replicas that are added and removed through the admin port: ``POST /replicas``, ``DELETE /replicas/NAME``.

Whoever may do that must not be able to send prompts and keys to any host: only hosts that
``admin_replicas.allow`` names, never addresses where clouds keep credentials, and nothing in the request that
makes this process read a file or its environment. Without ``admin_replicas`` both routes refuse.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any
from urllib.parse import urlsplit

import orjson
from aiohttp import web
from pydantic import ValidationError

from router.config import RouterConfig
from router.config_errors import ConfigError, describe
from router.discovery.resolver import addresses
from router.proxy.allowed_hosts import NotAllowed, require_allowed
from router.replica_config import ReplicaConfig

KEYS = frozenset({"url", "name", "kind", "model", "weight", "tags", "cost", "block_size"})
"""Of ``replicas[]``. The others name files, variables, keys or further addresses."""
RESOLVE_S = 5.0

Resolve = Callable[[str, int, float], Awaitable[list[str]]]

audit = logging.getLogger("warmroute.audit")


class AddedReplicas:
    """Those of this router, until it ends or they are removed."""

    def __init__(
        self,
        config: RouterConfig,
        in_force: Callable[[], Sequence[ReplicaConfig]],
        changed: Callable[[], Any],
        *,
        resolve: Resolve = addresses,
    ) -> None:
        """``in_force``: all there are; ``changed``: makes the router use ``replicas``, or ``ConfigError``."""
        self._in_force = in_force
        self._changed = changed
        self._resolve = resolve
        self._added: dict[str, ReplicaConfig] = {}
        self.apply(config)

    def apply(self, config: RouterConfig) -> None:
        """``config`` is the one in force. What was added stays."""
        self._allowed = config.admin_replicas

    @property
    def replicas(self) -> tuple[ReplicaConfig, ...]:
        """In the order they were added."""
        return tuple(self._added.values())

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """The two routes."""
        router.add_post("/replicas", self._add)
        router.add_delete("/replicas/{replica}", self._remove)

    async def _add(self, request: web.Request) -> web.Response:
        try:
            replica = await self._checked(await request.read())
            self._join(replica)
        except (NotAllowed, ConfigError) as error:
            audit.warning("from %s: adding a replica was refused: %s", request.remote, error)
            status = web.HTTPForbidden if isinstance(error, NotAllowed) else web.HTTPBadRequest
            raise status(text=str(error)) from None
        audit.info("from %s: replica %s (%s) added", request.remote, replica.name, replica.url)
        return web.json_response({"replica": replica.name, "url": replica.url, "added": True})

    async def _remove(self, request: web.Request) -> web.Response:
        self._require_on()
        name = request.match_info["replica"]
        if name not in self._added:
            known = any(one.effective_name == name for one in self._in_force())
            audit.warning("from %s: removing replica %r was refused: not added here", request.remote, name)
            if known:
                raise web.HTTPConflict(
                    text=f"{name} was configured or found, not added: take it out there, or drain it"
                )
            raise web.HTTPNotFound(text=f"no replica is named {name!r}")
        removed = self._added.pop(name)
        try:
            self._changed()
        except ConfigError as error:
            self._added[name] = removed
            raise web.HTTPBadRequest(text=str(error)) from None
        audit.info("from %s: replica %s removed", request.remote, name)
        return web.json_response({"replica": name, "added": False})

    def _require_on(self) -> None:
        if self._allowed is None:
            raise web.HTTPForbidden(text="off; set admin_replicas.allow to the networks or hosts it may use")

    async def _checked(self, body: bytes) -> ReplicaConfig:
        """The replica that ``body`` describes, at an address that was checked."""
        self._require_on()
        assert self._allowed is not None
        replica = _read(body)
        parts = urlsplit(replica.url)
        host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
        try:
            found = await self._resolve(host, port, RESOLVE_S)
        except OSError as error:
            raise ConfigError(f"url: {host} cannot be resolved: {error.strerror or 'no answer'}") from None
        require_allowed(host, found, self._allowed)
        name = replica.effective_name
        if parts.scheme == "http":  # else the certificate says who it is
            address = f"[{found[0]}]" if ":" in found[0] else found[0]
            return replica.model_copy(update={"name": name, "url": f"http://{address}:{port}"})
        return replica.model_copy(update={"name": name})

    def _join(self, replica: ReplicaConfig) -> None:
        name = replica.effective_name
        for one in self._in_force():
            if one.effective_name == name or one.url == replica.url:
                raise ConfigError(
                    f"{one.effective_name} ({one.url}) is there already; choose another name or URL"
                )
        self._added[name] = replica
        try:
            self._changed()
        except ConfigError:
            del self._added[name]
            raise


def _read(body: bytes) -> ReplicaConfig:
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        data = None
    if not isinstance(data, dict):
        raise ConfigError('expected a JSON object such as {"url": "http://10.0.0.1:8000"}')
    others = sorted(set(data) - KEYS)
    if others:
        raise ConfigError(f"{', '.join(others)}: not taken here; expected some of {', '.join(sorted(KEYS))}")
    try:
        return ReplicaConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error, "body", None, ReplicaConfig)) from None
