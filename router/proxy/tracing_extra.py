"""OpenTelemetry is imported only where ``tracing:`` asks for it; without it nothing of it is installed."""

import importlib.util
import os
import socket
from typing import TYPE_CHECKING

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.proxy.counters import Counters

if TYPE_CHECKING:
    from router.proxy.tracing import Tracing


def require_otel_extra(config: RouterConfig) -> None:
    """Raise ``ConfigError`` if traces are wanted and what they need is not installed."""
    if config.tracing is None:
        return
    for package in ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"):
        if not _is_installed(package):
            raise ConfigError(
                f"tracing: {package} is not installed; run `pip install 'warmroute[otel]'` or remove tracing"
            )


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # not even what it lies in
        return False


def start_tracing(config: RouterConfig, counters: Counters) -> "Tracing | None":
    """What ``config`` asks for, with its thread running."""
    if config.tracing is None:
        return None
    from router.proxy.tracing import Tracing

    return Tracing(config.tracing, counters, f"{socket.gethostname()}-{os.getpid()}")
