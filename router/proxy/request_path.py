"""How requests come in, as a router sees it: over HTTP (``DataPlane``) or from Envoy (endpoint picker)."""

import ssl
from typing import Protocol

from router.config import RouterConfig
from router.proxy.counters import Counters
from router.proxy.prompt_reader import PromptReader
from router.proxy.service import Service
from router.routing.fleet import Fleet


class RequestPath(Protocol):
    """One port that takes requests; the fleet's events for them are raised here."""

    service: Service
    address: str
    """Where it really listens."""

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen on the config's ``listen``. Raises ``OSError`` where that fails."""

    def begin_shutdown(self) -> None:
        """Say that no more requests are wanted; those that come are still taken."""

    async def stop(self, timeout_s: float) -> None:
        """Take nothing more, let requests finish for ``timeout_s``, then break what is left."""

    def apply(self, config: RouterConfig) -> None:
        """Use ``config``'s settings for requests that begin from now on; the address stays."""


class MakeRequestPath(Protocol):
    """A class of such ports."""

    def __call__(
        self, fleet: Fleet, config: RouterConfig, counters: Counters, *, prompt_reader: PromptReader | None
    ) -> RequestPath:
        """One that does not listen yet. Raises ``ConfigError`` where ``config`` does not suit it."""
