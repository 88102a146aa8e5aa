"""What every backend of shared state does, and what it reports; ``make_state`` picks the one configured."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.routing.fleet import Fleet
from router.state_config import StateConfig


@dataclass(frozen=True, slots=True)
class PeerReport:
    """One other router."""

    router: str
    heard_s_ago: float
    outstanding: int
    """Requests it holds or has in flight."""
    gaps: int


@dataclass(frozen=True, slots=True)
class StateReport:
    """For ``/fleet`` and ``/metrics``. Counts are since start."""

    kind: str
    state: str
    """``alone`` (memory), else a ``LinkState``."""
    fault: str | None = None
    since_s: float = 0.0
    """How long it has been in this state."""
    changes: int = 0
    router: str = ""
    """This router's name among its peers."""
    peers: tuple[PeerReport, ...] = ()
    lag_ms: float | None = None
    """From sending news until every router can have it, as last measured."""
    batches_sent: int = 0
    bytes_sent: int = 0
    batches_received: int = 0
    events_received: int = 0
    gaps: int = 0
    """How often batches of a peer were missing; each was made good by a statement."""
    late_batches: int = 0
    dropped_events: int = 0
    """Own news that could not be told; what still mattered was stated later."""
    unknown_replicas: int = 0
    """Events about replicas that this router's config does not name."""
    malformed: int = 0
    warmed_from: str | None = None
    """Where this router had its first knowledge from: a peer's name, or a file."""
    snapshot_written: bool | None = None
    """Whether the snapshot could be written when it last should have been; ``None``: there is none yet."""


class SharedState(Protocol):
    """One backend. Whatever becomes of its store, requests go on and none of this raises."""

    async def start(self) -> None:
        """Learn what can be learned before the first request, within about two seconds; then keep sharing."""

    async def stop(self) -> None:
        """Leave in good order: others let go of this router's work, what was learned is kept if it can be."""

    def apply(self, config: StateConfig) -> None:
        """Log in with the credentials of ``config`` from the next connection on; all else is as it was."""

    def report(self) -> StateReport:
        """How it stands."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """What the router is told by a backend."""

    released: Callable[[float], None] = lambda now: None
    """Requests that were held may have been sent: ``fleet.outbox``. Called with the time."""
    doubted: Callable[[str], None] = lambda replica: None
    """Another router ejected the replica of that name: worth a probe now."""


def make_state(
    config: RouterConfig,
    fleet: Fleet,
    callbacks: Callbacks = Callbacks(),
    *,
    clock: Callable[[], float] = time.monotonic,
) -> SharedState:
    """The backend that ``config`` names. Raises ``ConfigError``."""
    if config.state.kind == "memory":
        from router.state.memory_state import MemoryState

        return MemoryState(config.state, fleet, clock=clock)
    from router.state.redis_client import require_tls_files
    from router.state.redis_state import RedisState

    try:
        require_tls_files(config.state)
    except (OSError, ValueError) as error:
        raise ConfigError(f"state.tls: {error}; expected PEM files that this process may read") from None
    return RedisState(config.state, fleet, callbacks, clock=clock)
