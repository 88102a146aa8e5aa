"""Replicas from DNS, asked again and again."""

import asyncio
import importlib.util
from collections.abc import Awaitable, Callable

from router.config_errors import ConfigError
from router.discovery.resolver import addresses, service_targets
from router.discovery.source import Found, SourceStatus, log
from router.discovery_config import DnsDiscovery
from router.replica_config import ReplicaConfig

Resolve = Callable[[], Awaitable[list[tuple[str, int]]]]
"""Hosts and ports; none if the name has none; ``OSError`` if nobody could tell."""


class DnsSource:
    """One name."""

    def __init__(self, config: DnsDiscovery, resolve: Resolve | None = None) -> None:
        """``resolve``: asks instead of the system. Raises ``ConfigError`` where a package is missing."""
        if config.srv is not None and importlib.util.find_spec("dns") is None:
            raise ConfigError(
                f"discovery: {config.label}: dnspython is not installed; "
                "run `pip install 'warmroute[dns]'` or use host and port"
            )
        self._config = config
        self._resolve = resolve or self._ask
        self._no_hosts: list[str] = []

    async def watch(self, found: Found, status: SourceStatus) -> None:
        """As ``Source`` says. An answer without addresses counts when it came ``empty_answers`` times."""
        config = self._config
        empty, have_some = 0, False
        while True:
            try:
                replicas = self._replicas(await self._resolve())
            except OSError as error:
                status.failed(f"no answer: {error.strerror or error or type(error).__name__}")
            else:
                empty = 0 if replicas else empty + 1
                if have_some and 0 < empty < config.empty_answers:
                    status.failed(f"an empty answer; {config.empty_answers} in a row and the replicas leave")
                else:
                    status.well()
                    have_some = bool(replicas)
                    found(replicas)
            await asyncio.sleep(config.interval_s)

    def _replicas(self, places: list[tuple[str, int]]) -> tuple[ReplicaConfig, ...]:
        """Those at ``places``. A name that no host can have costs the others nothing, and is logged once."""
        replicas, no_hosts = [], []
        for host, port in places:
            try:
                replicas.append(self._config.replica_at(host, port))
            except ValueError:
                no_hosts.append(f"{host!r}:{port}")
        if no_hosts and no_hosts != self._no_hosts:
            log.warning("%s: no names of hosts: %s. Not used", self._config.label, ", ".join(no_hosts))
        self._no_hosts = no_hosts
        return tuple(replicas)

    async def _ask(self) -> list[tuple[str, int]]:
        config = self._config
        if config.srv is not None:
            return await service_targets(config.srv, config.nameserver, config.timeout_s)
        assert config.host is not None and config.port is not None
        found = await addresses(config.host, config.port, config.timeout_s)
        return [(address, config.port) for address in found]
