"""Watches the tenants' file: keys, limits and models change while requests go on, whole or not at all."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.proxy.counters import Counters
from router.tenants_config import TenantConfig
from router.tenants_file import united_tenants
from router.watched_file import WatchedFile

log = logging.getLogger("warmroute.tenants")


class TenantFileWatch:
    """Owned by the router; follows the config in force."""

    def __init__(
        self,
        config: Callable[[], RouterConfig],
        changed: Callable[[tuple[TenantConfig, ...]], None],
        counters: Counters,
    ) -> None:
        """``changed`` is called with all tenants there are, those written in the config included."""
        self._config = config
        self._changed = changed
        self._counters = counters
        self._task: asyncio.Task[None] | None = None
        self._failure: str | None = None

    def apply(self, config: RouterConfig) -> None:
        """Watch ``config``'s file, if it has one; what is in it now has been read."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        tenants = config.tenants
        if tenants is not None and tenants.file is not None:
            watch = self._watch(WatchedFile(tenants.file), tenants.interval_s)
            self._task = asyncio.create_task(watch, name="tenants file")

    async def stop(self) -> None:
        """Watch no more."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def _watch(self, file: WatchedFile, interval_s: float) -> None:
        while True:
            try:
                text = await asyncio.to_thread(file.look)
                if text is not None:
                    self._changed(united_tenants(self._config(), text))
                    self._works(file.path)
            except ConfigError as error:
                self._failed(str(error))
            except UnicodeDecodeError as error:
                self._failed(f"{file.path}: not UTF-8: {error.reason}")
            except OSError as error:
                self._failed(f"{file.path} cannot be read: {error.strerror}; expected a list of tenants")
            await asyncio.sleep(interval_s)

    def _works(self, path: str) -> None:
        if self._failure is not None:
            log.info("tenants: %s is used again", path)
            self._failure = None

    def _failed(self, why: str) -> None:
        """The same reason again is neither logged nor counted again."""
        if why != self._failure:
            log.error("tenants: %s. Those before stay", why)
            self._counters.failed_tenant_files += 1
            self._failure = why
