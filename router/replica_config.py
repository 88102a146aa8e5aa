"""The keys of one entry of ``replicas:`` in the router's YAML."""

from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from replica.contract.kv_event_endpoint import checked_endpoint, is_wildcard
from router.config_values import Secret, Section
from router.cost_config import CostConfig
from router.engines import ENGINES

MOST_NAME_CHARACTERS = 253
"""As long as names of pods and hosts can be."""


class KvEventsConfig(Section):
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
        return None if value is None else checked_endpoint(value)

    @model_validator(mode="after")
    def _reachable(self) -> "KvEventsConfig":
        if self.bind is False and is_wildcard(self.endpoint):
            raise ValueError(f"cannot connect to the wildcard {self.endpoint}; name the replica's host")
        return self

    @property
    def binds(self) -> bool:
        """This router listens, the replica connects."""
        return is_wildcard(self.endpoint) if self.bind is None else self.bind


def _peer_address(value: str) -> str:
    host, _, port = value.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65_535 or not value.isascii():
        raise ValueError(f"expected HOST:PORT, got {value!r}")
    if any(character in value for character in "; ,\r\n"):
        raise ValueError(f"expected HOST:PORT, got {value!r}")
    return value


PeerAddress = Annotated[str, AfterValidator(_peer_address)]


def _endpoint_alone(value: Any) -> Any:
    return {"endpoint": value} if isinstance(value, str) else value


class ReplicaTlsConfig(Section):
    """How an https replica is trusted; the system's authorities unless set."""

    ca: str | None = None
    """PEM file of the authority, or of the replica's own certificate."""
    insecure: bool = False
    """Trust whoever answers. For tests."""

    @model_validator(mode="after")
    def _one(self) -> "ReplicaTlsConfig":
        if self.insecure and self.ca is not None:
            raise ValueError("insecure trusts whoever answers, whatever ca says; keep one of them")
        return self


class ReplicaAddress(Section):
    """Where a replica is, and what it is called."""

    url: str
    name: str | None = None
    """Unique; the URL's host and port unless set. The same in every router of a fleet. Printable, up to 253
    characters: it stands in log lines, labels, headers and the admin port's paths."""

    @field_validator("name")
    @classmethod
    def _printable(cls, value: str | None) -> str | None:
        if value is not None and len(value) > MOST_NAME_CHARACTERS:
            raise ValueError(f"expected up to {MOST_NAME_CHARACTERS} characters, got {len(value):,}")
        if value is not None and not value.isprintable():
            raise ValueError(f"expected printable characters, got {value!r}")
        return value

    @field_validator("url")
    @classmethod
    def _http(cls, value: str) -> str:
        parts = urlsplit(value)
        if parts.scheme not in ("http", "https") or not parts.hostname or any(one <= " " for one in value):
            raise ValueError(f"expected http://HOST:PORT, got {value!r}")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ValueError(f"expected a URL without a path (the request's own path is used), got {value!r}")
        if parts.username is not None:
            raise ValueError("credentials in a replica URL are not supported; use api_key")
        if parts.port == 0:  # raises ValueError itself when out of range
            raise ValueError(f"port 0 is no place, got {value!r}")
        return value.rstrip("/")

    @property
    def server(self) -> tuple[str, str | None, int | None]:
        """Scheme, host and port: equal for URLs that lead to one server."""
        parts = urlsplit(self.url)
        return parts.scheme, parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)

    @property
    def effective_name(self) -> str:
        """The name, or the URL's host and port."""
        return self.name or urlsplit(self.url).netloc


class TransferConfig(Section):
    """What pulling KV from a peer costs."""

    fixed_ms: NonNegativeFloat = 26.0
    us_per_token: PositiveFloat = 4.3


class ReplicaTraits(Section):
    """What can be the same for many replicas."""

    kind: Literal["auto", "vllm", "sglang", "llamacpp", "tgi", "warmroute", "openai"] = "auto"
    """Which engine it is (``router.engines``); ``auto`` finds out."""
    model: str | None = None
    """The model it serves; asked from the replica (``/v1/models``) unless set."""
    api_key: Secret | None = None
    """Sent to it as a bearer token; the router's ``api_key`` unless set."""
    tls: ReplicaTlsConfig | None = None
    cost: CostConfig | None = None
    """What its work is taken to cost at first; the router's ``cost`` unless set."""
    weight: PositiveFloat = 1.0
    tags: tuple[str, ...] = ()
    block_size: PositiveInt | None = None
    """Tokens in a KV block; learned from its metrics and events, which win where they differ."""
    block_hash: Literal["auto", "sha256", "sha256_cbor", "warmroute", "tokens"] = "auto"
    """How it names blocks: vLLM's --prefix-caching-hash-algo, or ours. ``auto`` asks its metrics and checks;
    ``tokens`` translates whatever it uses through the tokens in its events."""
    block_hash_seed: str | None = None
    """The PYTHONHASHSEED a vLLM was started with, if it was."""
    role: Literal["prefill", "decode", "both"] = "both"
    """``prefill``: computes long prompts for others; ``decode``: answers, and computes little."""
    kv_pull: Literal["none", "warmroute", "vllm", "llm-d"] = "none"
    """How it gets KV that another computed: by ``x-warmroute-kv-source``, by ``kv_transfer_params``, or by
    its sidecar, which reads ``x-prefiller-host-port``."""
    transfer: TransferConfig = TransferConfig()
    """What pulling KV is taken to cost it at first."""


class ReplicaConfig(ReplicaTraits, ReplicaAddress):
    """One replica: an OpenAI-compatible server."""

    kv_events: Annotated[KvEventsConfig, BeforeValidator(_endpoint_alone)] | None = None
    kv_source: PeerAddress | None = None
    """HOST:PORT where it gives KV to its peers (``tiers.peers.listen`` of a warmroute replica)."""

    @model_validator(mode="after")
    def _role_fits(self) -> "ReplicaConfig":
        if self.role == "prefill" and self.kv_source is None and self.kv_pull not in ("vllm", "llm-d"):
            raise ValueError(
                f"{self.effective_name} has role prefill, but nobody could pull from it; give kv_source, or "
                "kv_pull: vllm or llm-d"
            )
        if self.role == "decode" and self.kv_pull == "none":
            raise ValueError(
                f"{self.effective_name} has role decode, but cannot pull KV; give kv_pull: warmroute, "
                "vllm or llm-d"
            )
        return self

    @model_validator(mode="after")
    def _tls_fits(self) -> "ReplicaConfig":
        if self.tls is not None and not self.url.startswith("https:"):
            raise ValueError(f"tls belongs to https replicas, not to {self.url}")
        return self

    @model_validator(mode="after")
    def _events_fit(self) -> "ReplicaConfig":
        engine = ENGINES.get(self.kind)
        if self.kv_events is not None and engine is not None and not engine.publishes_kv_events:
            raise ValueError(f"kv_events: {engine.title} (kind: {self.kind}) publishes none; leave them out")
        return self
