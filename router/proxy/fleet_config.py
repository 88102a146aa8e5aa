"""The routing core's part of the config: replicas, policy and settings as plain values."""

import random

from router.config import RouterConfig
from router.proxy.fair_turns import never_held
from router.replica_config import ReplicaConfig
from router.routing.block_naming import HashScheme
from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthSettings, HealthState
from router.routing.kv_route import KvPull, Role
from router.routing.policies import POLICIES
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.power_of_two import PowerOfTwo
from router.routing.policies.prefix_affinity import PrefixAffinity
from router.routing.replica_state import ReplicaSpec
from router.routing.view import Policy


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


def make_selectable(config: RouterConfig, rng: random.Random) -> dict[str, Policy]:
    """The policies that a request may ask for, by kind; asking for the usual one changes nothing."""
    policy = config.policy
    return {kind: POLICIES[kind](rng) for kind in policy.selectable if kind != policy.kind}


def make_fleet(config: RouterConfig, initial_health: HealthState = HealthState.HEALTHY) -> Fleet:
    """The fleet ``config`` names; nobody has been probed yet."""
    rng = random.Random(config.seed)
    specs = [replica_spec(replica, config) for replica in config.replicas]
    policy, selectable = make_policy(config, rng), make_selectable(config, rng)
    return Fleet(
        specs,
        policy,
        fleet_settings(config),
        selectable=selectable,
        rng=rng,
        initial_health=initial_health,
    )


def fleet_settings(config: RouterConfig) -> FleetSettings:
    """What the routing core needs beside replicas and policy."""
    health = config.health
    return FleetSettings(
        slo_ttft_s=config.slo.ttft_ms / 1_000.0,
        slo_tpot_s=config.slo.tpot_ms / 1_000.0,
        default_capacity_tokens=config.index.default_capacity_tokens,
        exact=bool(config.models),
        hold=never_held(config) is None,
        hold_asked=config.tenants is not None,
        guard_caches=config.hold.guard_caches,
        health=HealthSettings(
            failures_to_eject=health.failures_to_eject,
            probe_failures_to_eject=health.probe_failures_to_eject,
            backoff_s=health.backoff_s,
            max_backoff_s=health.max_backoff_s,
            silent_after_s=health.silent_after_s,
            silent_factor=health.silent_factor,
        ),
    )


def replica_spec(replica: ReplicaConfig, config: RouterConfig) -> ReplicaSpec:
    """One replica as the routing core knows it; ``config`` has what it does not say itself."""
    cost = replica.cost or config.cost
    return ReplicaSpec(
        name=replica.effective_name,
        url=replica.url,
        model=replica.model,
        weight=replica.weight,
        tags=replica.tags,
        blocks=BlockSettings(
            scheme=_hash_scheme(replica), block_tokens=replica.block_size, seed=replica.block_hash_seed
        ),
        prefill=cost.prefill,
        decode=cost.decode,
        role=Role(replica.role),
        kv_pull=KvPull(replica.kv_pull),
        kv_source=replica.kv_source,
        transfer_fixed_s=replica.transfer.fixed_ms / 1e3,
        transfer_token_s=replica.transfer.us_per_token / 1e6,
        hardware=cost.hardware,
        engine=None if replica.kind == "auto" else replica.kind,
    )


def _hash_scheme(replica: ReplicaConfig) -> HashScheme | None:
    """How the replica names blocks; ``None``: its metrics tell, or its events are translated."""
    if replica.block_hash != "auto":
        return replica.block_hash
    return "warmroute" if replica.kind == "warmroute" else None
