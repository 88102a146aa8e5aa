"""From a config to a running router: fleet, data plane, prober and admin port, in order."""

import asyncio
import logging
import random
import signal
import sys
from collections.abc import Callable

import uvloop

from router.config import ConfigError, ReplicaConfig, RouterConfig
from router.proxy.admin import Admin
from router.proxy.counters import Counters
from router.proxy.data_plane import DataPlane
from router.proxy.kv_event_feed import KvEventFeed
from router.proxy.prober import Prober
from router.proxy.prompt_reader import make_prompt_reader
from router.routing.block_naming import HashScheme
from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet, FleetSettings
from router.routing.health import HealthSettings
from router.routing.policies import POLICIES
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.power_of_two import PowerOfTwo
from router.routing.policies.prefix_affinity import PrefixAffinity
from router.routing.replica_state import ReplicaSpec
from router.routing.view import Policy

log = logging.getLogger("warmroute")


def make_policy(config: RouterConfig, rng: random.Random) -> Policy:
    """The policy ``config`` names, with its settings."""
    policy = config.policy
    if policy.price is not None:
        return PrefixAffinity(rng, policy.price)
    if policy.measure is not None:
        return (
            LeastLoaded(rng, policy.measure)
            if policy.kind == "least_loaded"
            else PowerOfTwo(rng, policy.measure)
        )
    return POLICIES[policy.kind](rng)


def make_fleet(config: RouterConfig) -> Fleet:
    """The fleet ``config`` names; nobody has been probed yet."""
    rng = random.Random(config.seed)
    health = config.health
    settings = FleetSettings(
        slo_ttft_s=config.slo.ttft_ms / 1_000.0,
        slo_tpot_s=config.slo.tpot_ms / 1_000.0,
        default_capacity_tokens=config.index.default_capacity_tokens,
        exact=bool(config.models),
        hold=config.hold.enabled and config.policy.kind == "predicted_finish",
        health=HealthSettings(
            failures_to_eject=health.failures_to_eject,
            probe_failures_to_eject=health.probe_failures_to_eject,
            backoff_s=health.backoff_s,
            max_backoff_s=health.max_backoff_s,
        ),
    )
    specs = [
        ReplicaSpec(
            name=replica.effective_name,
            url=replica.url,
            model=replica.model,
            weight=replica.weight,
            tags=replica.tags,
            blocks=BlockSettings(
                scheme=_hash_scheme(replica), block_tokens=replica.block_size, seed=replica.block_hash_seed
            ),
        )
        for replica in config.replicas
    ]
    return Fleet(specs, make_policy(config, rng), settings, rng=rng)


def _hash_scheme(replica: ReplicaConfig) -> HashScheme | None:
    """How the replica names blocks; ``None``: its metrics tell, or its events are translated."""
    if replica.block_hash != "auto":
        return replica.block_hash
    return "warmroute" if replica.kind == "warmroute" else None


class Router:
    """One router process: what ``warmroute serve`` runs and tests start in their own loop."""

    def __init__(self, config: RouterConfig, load: Callable[[], RouterConfig] | None = None) -> None:
        self.config = config
        self._load = load
        self.counters = Counters()
        self.fleet = make_fleet(config)
        exact = self.fleet.caches.exact
        self.prompt_reader = make_prompt_reader(config, lambda: exact.namings, self.counters)
        self.kv_events = KvEventFeed(self.fleet, config, self.counters)
        self.data_plane = DataPlane(self.fleet, config, self.counters, prompt_reader=self.prompt_reader)
        self.prober = Prober(self.fleet, config)
        self.admin = Admin(self.fleet, config, self.counters, self.reload, prompt_reader=self.prompt_reader)

    async def start(self) -> None:
        """Probe once, then listen; replicas that are down join when they come up."""
        await self.admin.start()
        await self.prober.start()
        await self.kv_events.start()  # the prober has asked for block sizes by now
        await self.data_plane.start()
        usable = sum(replica.usable for replica in self.fleet.replicas)
        log.info(
            "listening on %s (admin %s), policy %s, %d of %d replicas up",
            self.data_plane.address,
            self.admin.address,
            self.config.policy.kind,
            usable,
            len(self.fleet.replicas),
        )

    async def stop(self) -> None:
        """Readiness goes first, then the door closes, streams finish up to the limit."""
        self.data_plane.begin_shutdown()
        if self.config.shutdown_delay_s:
            await asyncio.sleep(self.config.shutdown_delay_s)
        await self.data_plane.stop(self.config.shutdown_timeout_s)
        await self.kv_events.stop()
        await self.prober.stop()
        await self.admin.stop()
        if self.prompt_reader is not None:
            self.prompt_reader.close()

    async def reload(self) -> RouterConfig:
        """Apply the config file again, whole; raises ``ConfigError`` and changes nothing if it is wrong."""
        if self._load is None:
            raise ConfigError("this router was started without a config file; there is nothing to reload")
        config = self._load()
        for field in ("listen", "admin", "replicas", "models", "state", "index", "health", "seed"):
            if getattr(config, field) != getattr(self.config, field):
                raise ConfigError(f"{field} cannot be changed while the router runs; restart it")
        self.fleet.policy = make_policy(config, random.Random(config.seed))
        self.data_plane.apply(config)
        self.config = self.admin.config = config
        log.info("config reloaded: policy %s", config.policy.kind)
        return config


async def _serve(config: RouterConfig, load: Callable[[], RouterConfig] | None) -> int:
    router = Router(config, load)
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    tasks: set[asyncio.Task[None]] = set()

    def on_term() -> None:
        if stop.is_set():
            log.warning("second signal: exiting at once")
            loop.call_soon(sys.exit, 1)
        stop.set()

    async def reload() -> None:
        try:
            await router.reload()
        except ConfigError as error:
            log.error("config not reloaded, the old one stays: %s", error)

    def on_hup() -> None:
        task = asyncio.create_task(reload(), name="reload")
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    for sig in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(sig, on_term)
    loop.add_signal_handler(signal.SIGHUP, on_hup)
    try:
        await router.start()
    except OSError as error:
        log.error("cannot listen: %s; is another process on that port?", error)
        return 1
    await stop.wait()
    await router.stop()
    log.info("stopped")
    return 0


def run(config: RouterConfig, load: Callable[[], RouterConfig] | None = None) -> int:
    """Run a router until SIGTERM or SIGINT; the process's exit code."""
    logging.basicConfig(
        level=config.log.level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )
    return uvloop.run(_serve(config, load))
