"""Every key of the router's YAML: default, unit, limits.

A setting is written once, here; the code below receives plain values. Unknown keys are errors.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, ValidationError, model_validator

from replica.contract.yaml_file import YamlError, read_yaml
from router.config_errors import ConfigError, describe
from router.config_values import (
    Address,
    HostName,
    PathPattern,
    Secret,
    Secrets,
    Section,
    Target,
)
from router.cors_config import CorsConfig
from router.cost_config import CostConfig
from router.discovery_config import AdminReplicasConfig, DiscoveryConfigs
from router.replica_config import ReplicaConfig
from router.state_config import StateConfig
from router.tenants_config import TenantsConfig
from router.tracing_config import TracingConfig

PolicyKind = Literal[
    "predicted_finish",
    "prefix_affinity",
    "least_loaded",
    "power_of_two",
    "session",
    "bounded_hash",
    "round_robin",
    "random",
]


class PolicyConfig(Section):
    """Which rule chooses the replica."""

    kind: PolicyKind = "predicted_finish"
    price: Annotated[float, Field(ge=0, le=100)] | None = None
    """``prefix_affinity``: how many times its own saved milliseconds a request may wait on top."""
    measure: Literal["in_flight", "outstanding_tokens", "wait"] | None = None
    """``least_loaded`` and ``power_of_two``: the load measure."""
    selectable: tuple[PolicyKind, ...] = ()
    """Kinds that a request may ask for with the header ``x-warmroute-policy``; others are ignored."""

    @model_validator(mode="after")
    def _fits(self) -> "PolicyConfig":
        if self.price is not None and self.kind != "prefix_affinity":
            raise ValueError(f"price belongs to prefix_affinity, not to {self.kind}")
        if self.measure is not None and self.kind not in ("least_loaded", "power_of_two"):
            raise ValueError(f"measure belongs to least_loaded and power_of_two, not to {self.kind}")
        return self


ControlField = Literal[
    "bootstrap_host",
    "bootstrap_pair_key",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
    "ec_transfer_params",
    "kv_transfer_params",
    "priority",
    "routed_dp_rank",
]
"""The same as ``routing.control_fields.CONTROL_FIELDS``."""


class SloConfig(Section):
    """What users are promised; prices decoding against first tokens."""

    ttft_ms: PositiveFloat = 1_000.0
    """Allowed on top of the prompt's own cold prefill time."""
    tpot_ms: PositiveFloat = 50.0


class TimeoutsConfig(Section):
    """Limits in seconds. None cuts a long generation that still makes progress; ``total_s`` is opt-in."""

    connect_s: PositiveFloat = 3.0
    first_byte_s: PositiveFloat = 900.0
    """From the request's last byte to the answer's first byte, which comes with the last if not streamed; of
    a stream to its first token, if that is longer than ``idle_s``: some engines send the head at once."""
    idle_s: PositiveFloat = 120.0
    """Between two pieces of the answer."""
    total_s: PositiveFloat | None = None
    client_header_s: PositiveFloat = 20.0
    """A client may take this long for a request's head and for each stall in its body."""
    client_keepalive_s: PositiveFloat = 75.0
    client_stall_s: PositiveFloat = 60.0
    """A client that takes no bytes for so long is cut."""
    replica_keepalive_s: PositiveFloat = 4.0
    """Idle connections to replicas are closed after this; below the 5 s that uvicorn servers allow."""


class LimitsConfig(Section):
    """Sizes that are refused rather than served."""

    body_bytes: PositiveInt = 64 * 1024 * 1024
    receiving_bytes: PositiveInt = 512 * 1024 * 1024
    """Of bodies that are not whole yet, all clients together."""
    header_bytes: PositiveInt = 64 * 1024
    client_connections: PositiveInt = 20_000


class RetriesConfig(Section):
    """Failures before the first byte are tried on another replica."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    budget_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    budget_floor: NonNegativeInt = 100


class HealthConfig(Section):
    """Probes and ejection."""

    interval_s: PositiveFloat = 2.0
    timeout_s: PositiveFloat = 2.0
    path: Target = "/health"
    failures_to_eject: PositiveInt = 3
    probe_failures_to_eject: PositiveInt = 2
    backoff_s: PositiveFloat = 1.0
    max_backoff_s: PositiveFloat = 30.0
    silent_after_s: PositiveFloat | None = 30.0
    """A replica that answers probes and produces nothing for so long, while others do, is ejected; null:
    never."""
    silent_factor: Annotated[float, Field(ge=1)] = 5.0
    """And for so many times as long as was predicted for what it has to do."""


class HoldConfig(Section):
    """Late binding: requests wait in the router, in order of work, not in an engine's queue."""

    enabled: bool = True
    """Used by ``predicted_finish``; the other policies send at once."""
    max_wait_s: PositiveFloat = 120.0
    """A request held longer is turned away with 429."""
    max_requests: PositiveInt = 10_000
    """Requests held at once; one more is turned away with 429."""
    guard_caches: bool = False
    """Requests also wait where running ones fill so much of the KV memory that hits are lost."""


class ModelConfig(Section):
    """Exact mode for one model (needs the extra ``[exact]``): its prompts are rendered and tokenized here."""

    tokenizer: str
    """A Hugging Face folder with ``tokenizer.json``, or that file."""
    chat_template: str | None = None
    """A file with the chat template; the folder's own unless set."""
    renders_as: Literal["vllm", "warmroute"] = "vllm"
    """Whose way of preparing messages and tools for the template to follow."""


class IndexConfig(Section):
    """The prefix index."""

    default_capacity_tokens: PositiveInt = 1_000_000
    """KV tokens a replica is taken to hold until its metrics tell."""


class KeysConfig(Section):
    """Bearer keys of those who may use the router; a port without keys is open to whoever reaches it.

    Several at once let keys be replaced one after the other.
    """

    public: Secrets = ()
    """For ``/v1/*``; ``/health`` and ``/readiness`` need none."""
    admin: Secrets = ()
    """For everything on the admin port but ``/health``."""

    @model_validator(mode="after")
    def _apart(self) -> "KeysConfig":
        if set(self.public) & set(self.admin):
            raise ValueError("a public key must not be an admin key as well")
        return self


class TlsConfig(Section):
    """TLS on the public port: PEM files, read again at each reload."""

    cert: str
    """The certificate and those of its issuers."""
    key: str | None = None
    """Its private key; in ``cert`` unless set."""


class RequestLogConfig(Section):
    """One JSON line per answered request, for ``warmroute diagnose``."""

    file: str
    prompts: Literal["keys", "bodies"] = "keys"
    """``keys``: hashes of blocks, which tell only what prompts share. ``bodies``: all that was asked."""
    app_header: Annotated[str, Field(pattern=r"^[A-Za-z0-9-]+$")] | None = None
    """A request header that names the caller's application or tenant."""
    rotate_mib: PositiveFloat = 100.0
    """A file this large becomes FILE.1, and that FILE.2."""
    keep: NonNegativeInt = 5
    """Files kept beside the present one."""


class LogConfig(Section):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["console", "json"] = "console"
    """``json``: one object per line, for machines."""
    requests: RequestLogConfig | None = None


class RouterConfig(Section):
    """The whole file."""

    listen: Address = "127.0.0.1:8080"
    admin: Address = "127.0.0.1:8081"
    admin_hosts: tuple[HostName, ...] = ()
    """Domain names by which browsers reach an admin port that has no keys."""
    readiness: Literal["replica", "router"] = "replica"
    """``replica``: ready while a replica is usable. ``router``: since the first one was, until it stops."""
    keys: KeysConfig = KeysConfig()
    tenants: TenantsConfig | None = None
    """Who shares the fleet, each with keys, limits and a cache of its own."""
    cors: CorsConfig = CorsConfig()
    tls: TlsConfig | None = None
    replicas: tuple[ReplicaConfig, ...] = ()
    discovery: DiscoveryConfigs = ()
    """Where more replicas are found while the router runs."""
    admin_replicas: AdminReplicasConfig | None = None
    """Lets replicas be added and removed through the admin port."""
    models: dict[str, ModelConfig] = Field(default_factory=dict)
    """By name as requests have it: models read in exact mode. All others are read as text."""
    policy: PolicyConfig = PolicyConfig()
    state: StateConfig = StateConfig()
    slo: SloConfig = SloConfig()
    cost: CostConfig = CostConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    limits: LimitsConfig = LimitsConfig()
    retries: RetriesConfig = RetriesConfig()
    health: HealthConfig = HealthConfig()
    hold: HoldConfig = HoldConfig()
    index: IndexConfig = IndexConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig | None = None
    expose_routing: bool = False
    """Answer with x-warmroute-replica, -reason and -matched-tokens."""
    expose_replica_urls: bool = False
    """Name replicas in errors that clients see."""
    api_key: Secret | None = None
    """Sent as a bearer token to replicas that have none of their own."""
    kv_source_key: Secret | None = None
    """Signs ``x-warmroute-kv-source``, for replicas that have it as their ``router_key``."""
    forward_client_key: bool = False
    """Pass a client's Authorization header on to replicas for which there is no key."""
    client_control_fields: tuple[ControlField, ...] = ()
    """Body fields that steer the engine and that clients may set all the same; others get 400."""
    allowed_paths: tuple[PathPattern, ...] = ()
    """What clients may ask replicas for; everything under ``/v1/`` unless set."""
    refused_paths: tuple[PathPattern, ...] = ()
    """What they may not, although it is allowed."""
    shutdown_delay_s: Annotated[float, Field(ge=0)] = 0.0
    """On SIGTERM ``/readiness`` fails at once and requests are still accepted for this long."""
    shutdown_timeout_s: PositiveFloat = 30.0
    """Streams may finish for this long after that."""
    seed: int | None = None
    """Seed of the ties' randomness; for tests."""

    @model_validator(mode="after")
    def _some_replicas(self) -> "RouterConfig":
        if not self.replicas and not self.discovery and self.admin_replicas is None:
            raise ValueError(
                "replicas: none; expected at least 1 entry `- url: http://HOST:PORT`, or discovery, or "
                "admin_replicas"
            )
        labels = [one.label for one in self.discovery]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"discovery: {', '.join(twice)}: given twice; keep one of them")
        return self

    @model_validator(mode="after")
    def _names_unique(self) -> "RouterConfig":
        names = [replica.effective_name for replica in self.replicas]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"replica names must differ; twice: {', '.join(twice)}")
        keys: dict[tuple[str, str | None, int | None], list[int]] = {}
        for number, replica in enumerate(self.replicas):
            keys.setdefault(replica.server, []).append(number)
        for numbers in keys.values():
            if len(numbers) > 1:
                given = ", ".join(f"replicas.{number}.url" for number in numbers)
                raise ValueError(
                    f"{given}: one server, {self.replicas[numbers[0]].url}, given {len(numbers)} times: its "
                    "load and cache would count as several; keep one of them (weight gives it more)"
                )
        bound = [r.kv_events.endpoint for r in self.replicas if r.kv_events and r.kv_events.binds]
        shared = sorted({one for one in bound if bound.count(one) > 1 and not one.endswith(":*")})
        if shared:
            raise ValueError(f"kv_events: replicas need ports of their own; shared: {', '.join(shared)}")
        if self.listen == self.admin and not self.listen.endswith(":0"):
            raise ValueError("listen and admin must be different addresses")
        return self

    @model_validator(mode="after")
    def _routers_are_counted(self) -> "RouterConfig":
        if self.tenants is not None and self.tenants.routers is None and self.state.kind == "redis":
            raise ValueError(
                "tenants.routers: missing; expected how many routers there are at most (with state.kind "
                "redis): one that cannot reach Redis keeps to its part of every limit, and must know it"
            )
        return self


def parse_config(data: Any, where: str, text: str | None = None) -> RouterConfig:
    """The config in ``data``; raises ``ConfigError`` naming every wrong key, and its line in ``text``."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of keys, got {type(data).__name__}")
    try:
        return RouterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error, where, text, RouterConfig)) from None


def load_config(path: str | Path) -> RouterConfig:
    """Read ``path``; raises ``ConfigError`` when it cannot be read or is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        data = read_yaml(text)
    except YamlError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        raise ConfigError(f"{path}: empty; expected at least `replicas:` with one `- url: http://HOST:PORT`")
    return parse_config(data, str(path), text)
