"""What the request path takes from the config, as plain values."""

from dataclasses import dataclass

from router.config import RouterConfig
from router.proxy.cors import Cors, cors_of
from router.proxy.isolation import Isolation
from router.proxy.key_ring import KeyRing, public_keys
from router.proxy.path_rules import PathRules
from router.proxy.tenancy import Tenancy
from router.routing.roster import Roster


@dataclass(frozen=True, slots=True)
class ProxySettings:
    """One config's settings. A request keeps those it began with."""

    hop: bytes
    """This router in ``Via``: what brings it back has gone in a circle."""
    connect_s: float
    first_byte_s: float
    idle_s: float
    total_s: float | None
    client_header_s: float
    client_keepalive_s: float
    client_stall_s: float
    replica_keepalive_s: float
    body_bytes: int
    receiving_bytes: int
    header_bytes: int
    client_connections: int
    attempts: int
    hold_max_wait_s: float
    hold_max_requests: int
    expose_routing: bool
    expose_replica_urls: bool
    forward_client_key: bool
    kv_source_key: bytes | None
    """Signs the header that names a source of KV."""
    keys: KeyRing
    """Of those who may use the public port, where tenants are not told apart."""
    tenancy: Tenancy | None
    """Whose keys they are, where tenants are."""
    isolation: Isolation | None
    """Set where a tenant's request may go only to replicas that keep its prompt apart."""
    cors: Cors | None
    """Set where the router answers browsers' preflights itself."""
    client_control_fields: frozenset[str]
    paths: PathRules
    """Which of the replicas' paths clients may ask for."""
    traced: bool
    """Each request has a span, and its replica gets that instead of the client's."""
    ready_without_replicas: bool
    """``/readiness`` stays as it is while no replica is usable."""

    @property
    def sweep_s(self) -> float:
        """How often limits are looked at: fine enough for the shortest of them, at most once a second."""
        limits = [
            self.connect_s,
            self.first_byte_s,
            self.idle_s,
            self.client_header_s,
            self.client_keepalive_s,
            self.client_stall_s,
            self.replica_keepalive_s,
            self.hold_max_wait_s,
        ]
        if self.total_s is not None:
            limits.append(self.total_s)
        return max(0.01, min(1.0, min(limits) / 4))


def proxy_settings(
    config: RouterConfig, tenancy: Tenancy | None, hop: bytes, replicas: Roster
) -> ProxySettings:
    """The request path's part of ``config``; ``tenancy``: made of its tenants; ``hop``: the router's name."""
    timeouts, limits = config.timeouts, config.limits
    return ProxySettings(
        hop=hop,
        connect_s=timeouts.connect_s,
        first_byte_s=timeouts.first_byte_s,
        idle_s=timeouts.idle_s,
        total_s=timeouts.total_s,
        client_header_s=timeouts.client_header_s,
        client_keepalive_s=timeouts.client_keepalive_s,
        client_stall_s=timeouts.client_stall_s,
        replica_keepalive_s=timeouts.replica_keepalive_s,
        body_bytes=limits.body_bytes,
        receiving_bytes=limits.receiving_bytes,
        header_bytes=limits.header_bytes,
        client_connections=limits.client_connections,
        attempts=config.retries.attempts,
        hold_max_wait_s=config.hold.max_wait_s,
        hold_max_requests=config.hold.max_requests,
        expose_routing=config.expose_routing,
        expose_replica_urls=config.expose_replica_urls,
        forward_client_key=config.forward_client_key,
        kv_source_key=None
        if config.kv_source_key is None
        else config.kv_source_key.get_secret_value().encode(),
        keys=public_keys(config.keys),
        tenancy=tenancy,
        isolation=Isolation(replicas) if tenancy is not None and tenancy.isolates else None,
        cors=cors_of(config),
        client_control_fields=frozenset(config.client_control_fields),
        paths=PathRules(config.allowed_paths, config.refused_paths),
        traced=config.tracing is not None,
        ready_without_replicas=config.readiness == "router",
    )
