"""Every key of the router's YAML: default, unit, limits.

A setting is written once, here; the code below receives plain values. Unknown keys are errors.
"""

from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    SecretStr,
    ValidationError,
    field_validator,
    model_validator,
)


class ConfigError(Exception):
    """The config is wrong: what, where, what was expected, what to do."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def _is_address(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("expected HOST:PORT or unix:/path")
    if value.startswith("unix:"):
        if len(value) <= len("unix:"):
            raise ValueError("expected unix:/path/of/socket")
        return value
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or int(port) > 65_535:
        raise ValueError(f"expected HOST:PORT or unix:/path, got {value!r}")
    return value


Address = Annotated[str, BeforeValidator(_is_address)]


WILDCARD_HOSTS = ("*", "0.0.0.0", "[::]")


class KvEventsConfig(_Section):
    """Where a replica publishes its KV events (ZMQ; needs the extra ``[events]``).

    A plain ``tcp://HOST:PORT`` stands for ``endpoint`` alone. vLLM binds when its own endpoint has a wildcard
    host (``tcp://*:5557``): name its host here. With a concrete host vLLM connects: then this router binds.
    """

    endpoint: str
    bind: bool | None = None
    """Listen on ``endpoint`` instead of connecting to it; unless set, true for a wildcard host."""
    replay: str | None = None
    """The replica's replay endpoint; without it a gap in the events costs what was known of its cache."""
    topic: str = ""
    """Only messages whose topic begins so."""

    @field_validator("endpoint", "replay")
    @classmethod
    def _transport(cls, value: str | None) -> str | None:
        if value is None:
            return None
        scheme, _, rest = value.partition("://")
        if scheme not in ("tcp", "ipc") or not rest or (scheme == "tcp" and ":" not in rest):
            raise ValueError(f"expected tcp://HOST:PORT or ipc:///path, got {value!r}")
        return value

    @model_validator(mode="after")
    def _reachable(self) -> "KvEventsConfig":
        if self.bind is False and self._wildcard:
            raise ValueError(f"cannot connect to the wildcard {self.endpoint}; name the replica's host")
        return self

    @property
    def _wildcard(self) -> bool:
        return self.endpoint.removeprefix("tcp://").rpartition(":")[0] in WILDCARD_HOSTS

    @property
    def binds(self) -> bool:
        """This router listens, the replica connects."""
        return self._wildcard if self.bind is None else self.bind


def _endpoint_alone(value: Any) -> Any:
    return {"endpoint": value} if isinstance(value, str) else value


class ReplicaConfig(_Section):
    """One replica: an OpenAI-compatible server."""

    url: str
    name: str | None = None
    """Unique; the URL's host and port unless set. The same in every router of a fleet."""
    kind: Literal["auto", "vllm", "sglang", "warmroute", "openai"] = "auto"
    model: str | None = None
    """The model it serves; asked from the replica (``/v1/models``) unless set."""
    weight: PositiveFloat = 1.0
    tags: tuple[str, ...] = ()
    kv_events: Annotated[KvEventsConfig, BeforeValidator(_endpoint_alone)] | None = None
    block_size: PositiveInt | None = None
    """Tokens in a KV block; learned from its metrics and events, which win where they differ."""
    block_hash: Literal["auto", "sha256", "sha256_cbor", "warmroute", "tokens"] = "auto"
    """How it names blocks: vLLM's --prefix-caching-hash-algo, or ours. ``auto`` asks its metrics and checks;
    ``tokens`` translates whatever it uses through the tokens in its events."""
    block_hash_seed: str | None = None
    """The PYTHONHASHSEED a vLLM was started with, if it was."""

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"expected http://HOST:PORT, got {value!r}")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(f"expected a URL without a path (the request's own path is used), got {value!r}")
        if parts.username is not None:
            raise ValueError("credentials in a replica URL are not supported; use api_key")
        _ = parts.port  # raises ValueError when out of range
        return value.rstrip("/")

    @property
    def effective_name(self) -> str:
        """The name, or the URL's host and port."""
        return self.name or urlsplit(self.url).netloc


class PolicyConfig(_Section):
    """Which rule chooses the replica."""

    kind: Literal[
        "predicted_finish",
        "prefix_affinity",
        "least_loaded",
        "power_of_two",
        "session",
        "bounded_hash",
        "round_robin",
        "random",
    ] = "predicted_finish"
    price: Annotated[float, Field(ge=0, le=100)] | None = None
    """``prefix_affinity``: how many times its own saved milliseconds a request may wait on top."""
    measure: Literal["in_flight", "outstanding_tokens", "wait"] | None = None
    """``least_loaded`` and ``power_of_two``: the load measure."""

    @model_validator(mode="after")
    def _fits(self) -> "PolicyConfig":
        if self.price is not None and self.kind != "prefix_affinity":
            raise ValueError(f"price belongs to prefix_affinity, not to {self.kind}")
        if self.measure is not None and self.kind not in ("least_loaded", "power_of_two"):
            raise ValueError(f"measure belongs to least_loaded and power_of_two, not to {self.kind}")
        return self


ControlField = Literal[
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "data_parallel_rank",
    "kv_transfer_params",
    "priority",
    "routed_dp_rank",
]
"""The same as ``routing.control_fields.CONTROL_FIELDS``."""


class StateConfig(_Section):
    """Where several routers share what they know."""

    kind: Literal["memory"] = "memory"


class SloConfig(_Section):
    """What users are promised; prices decoding against first tokens."""

    ttft_ms: PositiveFloat = 1_000.0
    """Allowed on top of the prompt's own cold prefill time."""
    tpot_ms: PositiveFloat = 50.0


class TimeoutsConfig(_Section):
    """Limits in seconds. None cuts a long generation that still makes progress; ``total_s`` is opt-in."""

    connect_s: PositiveFloat = 3.0
    first_byte_s: PositiveFloat = 300.0
    """From the request's last byte to the first byte of the answer."""
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


class LimitsConfig(_Section):
    """Sizes that are refused rather than served."""

    body_bytes: PositiveInt = 64 * 1024 * 1024
    header_bytes: PositiveInt = 64 * 1024
    client_connections: PositiveInt = 20_000


class RetriesConfig(_Section):
    """Failures before the first byte are tried on another replica."""

    attempts: Annotated[int, Field(ge=1, le=10)] = 3
    budget_share: Annotated[float, Field(ge=0, le=1)] = 0.2
    budget_floor: NonNegativeInt = 100


class HealthConfig(_Section):
    """Probes and ejection."""

    interval_s: PositiveFloat = 2.0
    timeout_s: PositiveFloat = 2.0
    path: str = "/health"
    failures_to_eject: PositiveInt = 3
    probe_failures_to_eject: PositiveInt = 2
    backoff_s: PositiveFloat = 1.0
    max_backoff_s: PositiveFloat = 30.0


class HoldConfig(_Section):
    """Late binding: requests wait in the router, in order of work, not in an engine's queue."""

    enabled: bool = True
    """Used by ``predicted_finish``; the other policies send at once."""
    max_wait_s: PositiveFloat = 120.0
    """A request held longer is turned away with 429."""
    max_requests: PositiveInt = 10_000
    """Requests held at once; one more is turned away with 429."""


class ModelConfig(_Section):
    """Exact mode for one model (needs the extra ``[exact]``): its prompts are rendered and tokenized here."""

    tokenizer: str
    """A Hugging Face folder with ``tokenizer.json``, or that file."""
    chat_template: str | None = None
    """A file with the chat template; the folder's own unless set."""
    renders_as: Literal["vllm", "warmroute"] = "vllm"
    """Whose way of preparing messages and tools for the template to follow."""


class IndexConfig(_Section):
    """The prefix index."""

    default_capacity_tokens: PositiveInt = 1_000_000
    """KV tokens a replica is taken to hold until its metrics tell."""


class LogConfig(_Section):
    """Log lines on standard error."""

    level: Literal["debug", "info", "warning", "error"] = "info"


class RouterConfig(_Section):
    """The whole file."""

    listen: Address = "127.0.0.1:8080"
    admin: Address = "127.0.0.1:8081"
    replicas: Annotated[tuple[ReplicaConfig, ...], Field(min_length=1)]
    models: dict[str, ModelConfig] = {}
    """By name as requests have it: models read in exact mode. All others are read as text."""
    policy: PolicyConfig = PolicyConfig()
    state: StateConfig = StateConfig()
    slo: SloConfig = SloConfig()
    timeouts: TimeoutsConfig = TimeoutsConfig()
    limits: LimitsConfig = LimitsConfig()
    retries: RetriesConfig = RetriesConfig()
    health: HealthConfig = HealthConfig()
    hold: HoldConfig = HoldConfig()
    index: IndexConfig = IndexConfig()
    log: LogConfig = LogConfig()
    expose_routing: bool = False
    """Answer with x-warmroute-replica, -reason and -matched-tokens."""
    expose_replica_urls: bool = False
    """Name replicas in errors that clients see."""
    api_key: SecretStr | None = None
    """Sent to replicas as a bearer token; without it a client's Authorization header is passed on
    only if ``forward_client_key`` is set."""
    forward_client_key: bool = False
    client_control_fields: tuple[ControlField, ...] = ()
    """Body fields that steer the engine and that clients may set all the same; others get 400."""
    shutdown_delay_s: Annotated[float, Field(ge=0)] = 0.0
    """On SIGTERM ``/readiness`` fails at once and requests are still accepted for this long."""
    shutdown_timeout_s: PositiveFloat = 30.0
    """Streams may finish for this long after that."""
    seed: int | None = None
    """Seed of the ties' randomness; for tests."""

    @model_validator(mode="after")
    def _names_unique(self) -> "RouterConfig":
        names = [replica.effective_name for replica in self.replicas]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"replica names must differ; twice: {', '.join(twice)}")
        bound = [r.kv_events.endpoint for r in self.replicas if r.kv_events and r.kv_events.binds]
        shared = sorted({one for one in bound if bound.count(one) > 1 and not one.endswith(":*")})
        if shared:
            raise ValueError(f"kv_events: replicas need ports of their own; shared: {', '.join(shared)}")
        if self.listen == self.admin and not self.listen.endswith(":0"):
            raise ValueError("listen and admin must be different addresses")
        return self


def parse_config(data: Any, where: str) -> RouterConfig:
    """The config in ``data``; raises ``ConfigError`` naming every key that is wrong."""
    if not isinstance(data, dict):
        raise ConfigError(f"{where}: expected a mapping of keys, got {type(data).__name__}")
    try:
        return RouterConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError(describe(error, where)) from None


def describe(error: ValidationError, where: str) -> str:
    """One line per wrong key: where, what was given, what was expected."""
    lines = []
    errors = error.errors()
    within = {one["loc"][0] for one in errors if len(one["loc"]) > 1}
    for one in errors:
        if one["type"] == "too_short":
            if one["loc"][:1] and one["loc"][0] in within:
                continue  # what is in the list was refused: that is said already
            lines.append(f"{where}: {'.'.join(map(str, one['loc']))}: empty; expected at least 1 entry")
            continue
        key = ".".join(str(part) for part in one["loc"]) or "(file)"
        got = "" if one["type"] in ("missing", "extra_forbidden") else _shown(one["input"])
        hint = "; unknown key, remove it or check its spelling" if one["type"] == "extra_forbidden" else ""
        message = one["msg"].removeprefix("Value error, ")
        lines.append(f"{where}: {key}: {message}{got}{hint}")
    return "\n".join(lines)


def _shown(value: Any) -> str:
    return f" (got {value!r})" if isinstance(value, str | int | float | bool) else ""


def load_config(path: str | Path) -> RouterConfig:
    """Read ``path``; raises ``ConfigError`` when it cannot be read or is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from None
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: not valid YAML: {error}") from None
    if data is None:
        raise ConfigError(f"{path}: empty; expected at least `replicas:` with one `- url: http://HOST:PORT`")
    return parse_config(data, str(path))
