"""What all requests of one data plane share: fleet, settings, counters, clock, retry budget, pools, ids."""

import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from replica.contract.kv_source import KV_SOURCE_HEADER, kv_source_value
from router.config import RouterConfig
from router.proxy.counters import Counters
from router.proxy.failure_log import FailureLog
from router.proxy.prompt_reader import PromptReader
from router.proxy.recent import Recent
from router.proxy.replica_access import ReplicaAccess, replica_accesses
from router.proxy.replica_pool import ReplicaPool
from router.proxy.request_log import RequestLog
from router.proxy.router_error import RouterError
from router.proxy.settings import ProxySettings, proxy_settings
from router.proxy.tenancy import Tenancy
from router.proxy.turn_writes import TurnWrites
from router.routing.decision import Decision, Reason
from router.routing.fleet import Fleet
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.kv_route import KvPull
from router.routing.replica_state import ReplicaState
from router.routing.retry import RetryBudget, RetrySettings
from router.tenants_file import read_tenants

if TYPE_CHECKING:
    from router.proxy.tracing import Tracing

logger = logging.getLogger("warmroute.proxy")

PREFILLER_HEADER: Final = "x-prefiller-host-port"
"""What the routing sidecar of llm-d reads."""


class Service:
    """Owned by the data plane; requests read it and count in ``counters``."""

    __slots__ = (
        "_closing",
        "_hop",
        "_id_prefix",
        "_ids",
        "_pools",
        "_retries",
        "budget",
        "clock",
        "counters",
        "failures",
        "fleet",
        "hold_began",
        "prompt_reader",
        "recent",
        "replica_left",
        "request_log",
        "settings",
        "shutting_down",
        "tenants",
        "tracing",
        "was_ready",
        "writes",
    )

    def __init__(
        self, fleet: Fleet, config: RouterConfig, counters: Counters, clock: Callable[[], float]
    ) -> None:
        self.fleet = fleet
        self.counters = counters
        self.clock = clock
        self.writes = TurnWrites()
        self.failures = FailureLog(clock)
        self.recent = Recent()
        self.settings: ProxySettings
        self.budget: RetryBudget
        self._retries: RetrySettings | None = None
        self.shutting_down = False
        self.was_ready = False
        """A replica was usable when somebody asked for ``/readiness``."""
        self.hold_began: Callable[[], None] = lambda: None
        """Called when a request begins to wait in the router."""
        self.replica_left: Callable[[ReplicaState], None] = lambda replica: None
        """Called when a replica that was removed has nothing in flight any more."""
        self.prompt_reader: PromptReader | None = None
        """Set where some models are read token by token."""
        self.request_log: RequestLog | None = None
        """Set where answered requests are written down."""
        self.tracing: Tracing | None = None
        """Set where requests are traced."""
        self._pools: dict[ReplicaState, ReplicaPool] = {}
        self._closing: list[ReplicaPool] = []
        """Pools of replicas that are gone, with connections that are still in use."""
        unique = os.urandom(6).hex().encode()
        self._id_prefix = b"wr-" + unique + b"-"
        self._hop = b"warmroute-" + unique
        self._ids = 0
        self.tenants = read_tenants(config)
        """The tenants of the config that is applied next."""
        self.apply(config)
        accesses = replica_accesses(config)
        for replica in fleet.replicas:
            self.replica_added(replica, accesses[replica.name])

    def apply(self, config: RouterConfig) -> None:
        """New settings for requests that begin from now on."""
        book, counters, tenancy = self.fleet.tenants, self.counters, None
        if config.tenants is not None:
            tenancy = Tenancy(config.tenants, self.tenants, config.keys, book, counters)
        elif book.quotas:
            book.applied(())
            counters.keep_tenants(book.quotas)
        self.settings = proxy_settings(config, tenancy, self._hop, self.fleet.replicas)
        retries = RetrySettings(
            config.retries.attempts, config.retries.budget_share, config.retries.budget_floor
        )
        if retries != self._retries:  # else what is saved up stays
            self._retries, self.budget = retries, RetryBudget(retries)

    def found_silent(self, flight: InFlight, now: float) -> None:
        """The replica of ``flight`` was ejected because it produces nothing."""
        logger.warning(
            "replica %s is ejected: it answers probes, but has produced nothing for %.0f s, though requests "
            "wait there and other replicas produce (health.silent_after_s)",
            flight.replica.name,
            now - max(flight.sent_at, flight.replica.progress_at),
        )
        self.send_released(now)

    def send_released(self, now: float) -> None:
        """An event may have made room on a replica: requests that were held for it go out now."""
        outbox = self.fleet.outbox
        while outbox:
            held = outbox.pop(0)
            try:
                held.context.hold_ended(held.flight, now)
            except Exception:  # a fault in one request is not that of the one whose end let it go
                logger.exception("a fault of the router's own")
                held.context.failed_inside()
                if held.flight is not None:
                    self.fleet.cancelled(held.flight, now)

    def drop_waiting(self, held: Held, now: float) -> None:
        """A request that waits in the router is over."""
        fleet = self.fleet
        if held in fleet.outbox:  # its turn had come, but nobody has looked yet
            fleet.outbox.remove(held)
            if held.flight is not None:
                fleet.cancelled(held.flight, now)
        else:
            fleet.dropped(held, now)

    def new_request_id(self) -> bytes:
        """Unique among all routers, and cheap."""
        self._ids += 1
        return b"%b%d" % (self._id_prefix, self._ids)

    def count_error(self, error: RouterError) -> None:
        """The router answers with an error of its own."""
        errors = self.counters.errors
        errors[error.code] = errors.get(error.code, 0) + 1

    def count_request(self, replica: str, status: int) -> None:
        """A request is over. ``replica``: who answered, or ""; ``status``: what the client got."""
        self.counters.answered(replica, status)

    def count_usage(self, usage: Usage) -> None:
        """A whole answer told its tokens."""
        counters = self.counters
        counters.prompt_tokens += usage.prompt_tokens or 0
        counters.cached_tokens += usage.cached_tokens or 0
        counters.output_tokens += usage.output_tokens or 0

    def kv_source(self, decision: Decision) -> tuple[str, str] | None:
        """The header field that names where a replica that pulls finds its KV; None if that has left."""
        route = decision.route
        if route is None or route.other is None:
            return None
        source = self.fleet.replicas.by_index.get(route.other)
        if source is None:
            return None
        if source.spec.kv_pull is KvPull.LLMD:
            if decision.reason is not Reason.HANDOFF:
                return None
            pool = self._pools[source]
            host = f"[{pool.host}]" if ":" in pool.host else pool.host
            return PREFILLER_HEADER, f"{host}:{pool.port}"
        if source.spec.kv_source is None:
            return None
        # What was computed for this request is all there; what is believed to be there is so long.
        tokens = None if decision.reason is Reason.HANDOFF else route.tokens
        self.counters.kv_sources_named += 1
        return KV_SOURCE_HEADER, kv_source_value(source.spec.kv_source, tokens, self.settings.kv_source_key)

    def pool(self, replica: ReplicaState) -> ReplicaPool:
        """The connections to ``replica``."""
        return self._pools[replica]

    def pools(self) -> list[ReplicaPool]:
        """Every pool there is."""
        return [*self._pools.values(), *self._closing]

    # --- replicas that come, go and change --------------------------------------------------------

    def replica_added(self, replica: ReplicaState, access: ReplicaAccess) -> None:
        """The fleet has this replica; requests may be sent there."""
        self._pools[replica] = ReplicaPool(replica.name, access, self.counters, self.writes)

    def replica_reaccessed(self, replica: ReplicaState, access: ReplicaAccess) -> None:
        """Its key or its TLS changed."""
        self._pools[replica].reaccessed(access)

    def forget_departed(self) -> None:
        """Replicas that were removed and whose last request is over: nothing of them is kept.

        Busy ones have rested meanwhile. Called every second or so.
        """
        self.fleet.rested(self.clock())
        for replica in self.fleet.forget_departed():
            self.replica_left(replica)
            pool = self._pools.pop(replica, None)
            if pool is not None:
                pool.close()
                self._closing.append(pool)
            if all(other.name != replica.name for other in self.fleet.replicas):
                self.counters.forget_replica(replica.name)
            logger.info("replica %s has left", replica.name)
        if self._closing:
            self._closing = [pool for pool in self._closing if pool.open_connections]
