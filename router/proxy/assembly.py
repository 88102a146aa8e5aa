"""From a config to a running router: fleet, data plane, prober and admin port, in order."""

import asyncio
import gc
import logging
import random
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress

import uvloop

from router.compiled import is_compiled
from router.config import RouterConfig
from router.config_errors import ConfigError, named_in_errors
from router.discovery.discovery import Discovery, Running
from router.discovery.union import united
from router.ended_tasks import unheard_faults
from router.log_lines import start_log, use_log_config
from router.proxy.added_replicas import AddedReplicas
from router.proxy.admin import Admin
from router.proxy.config_change import replica_changes, require_changeable
from router.proxy.counters import Counters
from router.proxy.data_plane import DataPlane
from router.proxy.fair_turns import unfair_turns
from router.proxy.fleet_config import fleet_settings, make_fleet, make_policy, make_selectable
from router.proxy.freed_memory import keep_freed_memory
from router.proxy.kv_event_feed import KvEventFeed, require_events_extra
from router.proxy.prober import Prober
from router.proxy.prompt_reader import make_prompt_reader
from router.proxy.recent_report import RecentReport
from router.proxy.replica_access import replica_accesses
from router.proxy.replica_set import ReplicaSet
from router.proxy.request_log import RequestLog
from router.proxy.request_path import MakeRequestPath
from router.proxy.sockets import raise_limit
from router.proxy.tenant_file_watch import TenantFileWatch
from router.proxy.tls import PublicTls, server_context
from router.proxy.tracing_extra import require_otel_extra, start_tracing
from router.routing.health import HealthState
from router.state.shared_state import Callbacks, make_state
from router.tenants_config import TenantConfig
from router.tenants_file import read_tenants

log = logging.getLogger("warmroute")

LOOPBACK = ("127.", "localhost:", "[::1]:", "unix:")
COLLECT_AFTER = (5_000, 5, 10)
"""Thresholds of the garbage collector, instead of 700, 10 and 10."""


class Router:
    """One router process: what ``warmroute serve`` runs and tests start in their own loop."""

    def __init__(
        self,
        config: RouterConfig,
        load: Callable[[], RouterConfig] | None = None,
        make_path: MakeRequestPath = DataPlane,
        file: str | None = None,
    ) -> None:
        """``load`` reads the config again, from ``file``; ``make_path`` says how requests come in."""
        self.config = config
        """In force, with the replicas that were found and added."""
        self._written = config
        """As the file has it."""
        self._refusals: frozenset[str] = frozenset()
        self._may_join = False
        """False until prober and KV events have begun with the configured replicas."""
        self._load = load
        self._file = file
        self._started = asyncio.Event()
        self._stopping = False
        require_otel_extra(config)
        self._tls = None if config.tls is None else PublicTls(config.tls)
        self.counters = Counters()
        self.fleet = make_fleet(config, HealthState.UNKNOWN)
        exact = self.fleet.caches.exact
        self.prompt_reader = make_prompt_reader(config, lambda: exact.namings, self.counters)
        self.kv_events = KvEventFeed(self.fleet, config, self.counters)
        self.data_plane = make_path(self.fleet, config, self.counters, prompt_reader=self.prompt_reader)
        self.data_plane.service.request_log = self._request_log(config)
        if (request_log := self.data_plane.service.request_log) is not None:
            request_log.policy = config.policy
        self.prober = Prober(self.fleet, config)
        self.data_plane.service.replica_left = self.prober.unwatch
        self._replica_set = ReplicaSet(self.fleet, self.data_plane.service, self.prober, self.kv_events)
        self.discovery = Discovery(self._replicas_found)
        self.added = AddedReplicas(config, lambda: self.config.replicas, self._replicas_changed)
        self._tenant_file = TenantFileWatch(lambda: self._written, self._tenants_changed, self.counters)
        self.state = make_state(
            config, self.fleet, Callbacks(self.data_plane.service.send_released, self.prober.probe_now)
        )
        self.admin = Admin(
            self.fleet,
            config,
            self.counters,
            self.reload,
            self.state.report,
            self.added,
            self.discovery.report,
            RecentReport(self.fleet, self.data_plane.service.recent),
            lambda: self.data_plane.service.settings.tenancy,
            prompt_reader=self.prompt_reader,
        )

    async def start(self) -> None:
        """Find and probe once, then listen; replicas that are down join when they come up.

        Raises ``ConfigError`` if what was found clashes with the config, ``OSError`` if it cannot listen.
        """
        await self.discovery.start(self._written.discovery)
        self._united(self._written, self.discovery.running)
        if self._refusals:
            await self.discovery.stop()
            clashes = "; ".join(sorted(self._refusals))
            raise ConfigError(f"{clashes}. Take one of them out, or name it otherwise")
        await self.admin.start()
        await self.prober.start()
        await self.kv_events.start()  # the prober has asked for block sizes by now
        await self._first_found()
        self._tenant_file.apply(self._written)
        await self.state.start()
        self.data_plane.service.tracing = start_tracing(self.config, self.counters)
        await self.data_plane.start(None if self._tls is None else self._tls.context)
        self._started.set()
        usable = sum(replica.usable for replica in self.fleet.replicas)
        if not is_compiled():
            log.info("the request path is plain Python; compiled (docs/operations.md) it takes half the CPU")
        log.info(
            "listening on %s (admin %s), policy %s, %d of %d replicas up",
            self.data_plane.address,
            self.admin.address,
            self.config.policy.kind,
            usable,
            len(self.fleet.replicas),
        )
        if not self.config.keys.admin and not self.config.admin.startswith(LOOPBACK):
            log.warning("the admin port %s is open to whoever reaches it: set keys.admin", self.admin.address)
        _warn_of_unfair_turns(self.config)

    async def stop(self) -> None:
        """Readiness goes first, then the door closes, streams finish up to the limit."""
        self._stopping = True
        self.data_plane.begin_shutdown()
        if self.config.shutdown_delay_s:
            await asyncio.sleep(self.config.shutdown_delay_s)
        await self.discovery.stop()
        await self._tenant_file.stop()
        await self.data_plane.stop(self.config.shutdown_timeout_s)
        await self.state.stop()
        await self.kv_events.stop()
        await self.prober.stop()
        await self.admin.stop()
        if self.prompt_reader is not None:
            self.prompt_reader.close()
        tracing = self.data_plane.service.tracing
        if tracing is not None:
            await tracing.stop()
        request_log = self.data_plane.service.request_log
        if request_log is not None:
            request_log.close()

    async def reload(self) -> RouterConfig:
        """Apply the config file again, whole; raises ``ConfigError`` and changes nothing if it is wrong.

        A router that is still starting is waited for.
        """
        await self._started.wait()
        try:
            if self._stopping:
                raise ConfigError("this router is stopping")
            if self._load is None:
                raise ConfigError("this router was started without a config file; there is nothing to reload")
            config = self._load()
            with named_in_errors(self._file):
                self._apply(config)
        except ConfigError as error:
            self.counters.failed_reloads += 1
            log.warning("config not reloaded, the old one stays: %s", error)
            raise
        self.counters.reloads += 1
        log.info("config reloaded: policy %s, %d replicas", config.policy.kind, len(config.replicas))
        _warn_of_unfair_turns(config)
        use_log_config(config.log)
        return config

    def _apply(self, written: RouterConfig) -> None:
        """All that may fail comes first; then nothing does. No ``await``: no request sees half of it."""
        sources = self.discovery.prepared(written.discovery)
        config = self._united(written, sources)
        require_changeable(self.config, config)
        require_events_extra(config)
        accesses = replica_accesses(config)
        tenants = read_tenants(written)
        certificate = None if config.tls is None else server_context(config.tls)
        changes = replica_changes(self.config, config)
        service = self.data_plane.service
        old_log, request_log = service.request_log, self._request_log(config)
        try:
            joined = self._replica_set.join(changes.joining, config)
        except ConfigError:
            if request_log is not None and request_log is not old_log:
                request_log.close()
            raise

        self._reconfigure_fleet(config)
        self._replica_set.change(changes, joined, config, accesses)
        self.discovery.use(sources)
        self.added.apply(written)
        if self._tls is not None and certificate is not None:
            self._tls.use(certificate)
        service.tenants = tenants
        self.data_plane.apply(config)
        self._tenant_file.apply(written)
        self.admin.apply(written)
        self.state.apply(config.state)
        if service.tracing is not None and config.tracing is not None:
            service.tracing.apply(config.tracing)
        service.request_log = request_log
        if request_log is not None:
            request_log.policy = config.policy
        if old_log is not None and old_log is not request_log:
            old_log.close()
        self.config, self._written = config, written

    def _tenants_changed(self, tenants: tuple[TenantConfig, ...]) -> None:
        """Their file did; all that may fail is done."""
        service = self.data_plane.service
        if tenants != service.tenants:
            service.tenants = tenants
            self.data_plane.apply(self.config)
            log.info("%d tenants from now on", len(tenants))

    # --- replicas that are found and added --------------------------------------------------------

    async def _first_found(self) -> None:
        """What was found by now joins, and is probed once, before the first request comes."""
        self._may_join = True
        probed = self._replicas_changed()
        if probed:
            await asyncio.wait(probed, timeout=self.config.health.timeout_s + 1.0)

    def _replicas_found(self) -> None:
        try:
            self._replicas_changed()
        except ConfigError as error:
            log.error("replicas that were found cannot be used, those before stay: %s", error)

    def _replicas_changed(self) -> "list[asyncio.Future[None]]":
        """Use what is found and added now; raises ``ConfigError`` and changes nothing if it cannot be.

        The futures are done when the new ones were probed once.
        """
        if not self._may_join:
            return []  # ``_first_found`` looks at them
        config = self._united(self._written, self.discovery.running)
        require_changeable(self.config, config)
        require_events_extra(config)
        changes = replica_changes(self.config, config)
        accesses = self._replica_set.accesses(self.config, config)
        joined = self._replica_set.join(changes.joining, config)
        probed = self._replica_set.change(changes, joined, config, accesses)
        self.config = config
        for one in joined:
            log.info("replica %s (%s) joins", one.name, one.spec.url)
        for name in changes.leaving:
            log.info("replica %s leaves", name)
        return probed

    def _united(self, written: RouterConfig, sources: Sequence[Running]) -> RouterConfig:
        """``written`` with the replicas that ``sources`` and the admin port have beside its own."""
        found = [(one.config.label, one.replicas) for one in sources]
        union = united([("replicas", written.replicas), *found, ("added", self.added.replicas)])
        for refusal in union.refusals:
            if refusal not in self._refusals:
                log.warning("%s. Not used", refusal)
        self._refusals = frozenset(union.refusals)
        return written.model_copy(update={"replicas": union.replicas})

    def _request_log(self, config: RouterConfig) -> RequestLog | None:
        """The one that ``config`` asks for: the one there is, if it is the same. Raises ``ConfigError``."""
        there, wanted = self.data_plane.service.request_log, config.log.requests
        if wanted is None or (there is not None and there.config == wanted):
            return None if wanted is None else there
        return RequestLog(wanted, self.counters)

    def _reconfigure_fleet(self, config: RouterConfig) -> None:
        """Policies that stay as they were keep whose turn it is."""
        policy, selectable = self.fleet.policy, self.fleet.selectable
        if config.policy != self.config.policy:
            rng = random.Random(config.seed)
            policy, selectable = make_policy(config, rng), make_selectable(config, rng)
        self.fleet.reconfigured(policy, selectable, fleet_settings(config))


def _warn_of_unfair_turns(config: RouterConfig) -> None:
    warning = unfair_turns(config)
    if warning is not None:
        log.warning("%s", warning)


def settle_garbage() -> None:
    """What was made at the start stays: no later collection looks at it again, some 20 ms each time.

    Nor do requests in flight set one off all the time: each is a dozen objects, none of them garbage.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT_AFTER)


async def _serve(
    config: RouterConfig,
    load: Callable[[], RouterConfig] | None,
    make_path: MakeRequestPath,
    file: str | None,
) -> int:
    with named_in_errors(file):
        router = Router(config, load, make_path, file)
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(unheard_faults)
    stop = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def on_term() -> None:
        if stop.is_set():
            log.warning("second signal: exiting at once")
            loop.call_soon(sys.exit, 1)
        stop.set()

    async def reload() -> None:
        with suppress(ConfigError):  # the log has it
            await router.reload()

    def on_hup() -> None:
        task = asyncio.create_task(reload(), name="reload")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, on_term)
    loop.add_signal_handler(signal.SIGHUP, on_hup)
    try:
        await router.start()
        settle_garbage()
    except OSError as error:
        log.error("cannot listen: %s; is another process on that port?", error)
        return 1
    except ConfigError as error:
        log.error("not started: %s", error)
        return 2
    await stop.wait()
    await router.stop()
    log.info("stopped")
    return 0


def run(
    config: RouterConfig,
    load: Callable[[], RouterConfig] | None = None,
    make_path: MakeRequestPath = DataPlane,
    file: str | None = None,
) -> int:
    """Run a router until SIGTERM or SIGINT; the process's exit code."""
    start_log(config.log)
    raise_limit(config.limits.client_connections)
    keep_freed_memory()
    return uvloop.run(_serve(config, load, make_path, file))
