"""The keys under ``discovery:`` and ``admin_replicas:``: where replicas come from beside ``replicas:``."""

import fnmatch
import ipaddress
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Discriminator,
    Field,
    PositiveFloat,
    PositiveInt,
    Tag,
    field_validator,
    model_validator,
)

from router.config_values import Address, Section, one_or_several
from router.replica_config import KvEventsConfig, ReplicaConfig, ReplicaTraits

Port = Annotated[int, Field(ge=1, le=65_535)]


class FileDiscovery(Section):
    """A file with a list of replicas, each with the keys of ``replicas:``."""

    kind: Literal["file"]
    path: Annotated[str, Field(min_length=1)]
    interval_s: PositiveFloat = 1.0
    """How often it is looked whether the file changed."""

    @property
    def label(self) -> str:
        """What logs and metrics call it."""
        return f"file {self.path}"


class _Found(Section):
    """What is said of replicas that are found by their address."""

    scheme: Literal["http", "https"] = "http"
    kv_events_port: Port | None = None
    """Each publishes its KV events there (ZMQ)."""
    kv_source_port: Port | None = None
    """Each gives KV to its peers there."""
    replica: ReplicaTraits = ReplicaTraits()
    """What holds for all that are found: keys of ``replicas:`` but those of one replica's address."""

    @model_validator(mode="after")
    def _makes_replicas(self) -> "_Found":
        self.replica_at("host", 1)
        return self

    def replica_at(self, host: str, port: int, name: str | None = None) -> ReplicaConfig:
        """The replica at that address. ``host``: a name or an address."""
        host = f"[{host}]" if ":" in host else host
        events = None
        if self.kv_events_port is not None:
            events = KvEventsConfig(endpoint=f"tcp://{host}:{self.kv_events_port}")
        source = None if self.kv_source_port is None else f"{host}:{self.kv_source_port}"
        traits = {key: getattr(self.replica, key) for key in self.replica.model_fields_set}
        return ReplicaConfig(
            url=f"{self.scheme}://{host}:{port}", name=name, kv_events=events, kv_source=source, **traits
        )


class DnsDiscovery(_Found):
    """The addresses (A, AAAA) of ``host``, or the targets of the SRV record ``srv``."""

    kind: Literal["dns"]
    host: str | None = None
    port: Port | None = None
    srv: str | None = None
    """Needs the extra ``[dns]``. Of its targets those of the first priority count."""
    interval_s: PositiveFloat = 10.0
    timeout_s: PositiveFloat = 5.0
    empty_answers: PositiveInt = 3
    """So many in a row, and the replicas leave."""
    nameserver: Address | None = None
    """For ``srv``; the system's unless set."""

    @model_validator(mode="after")
    def _one(self) -> "DnsDiscovery":
        if (self.host is None) == (self.srv is None) or (self.host is None) != (self.port is None):
            raise ValueError("expected host and port, or srv")
        if self.nameserver is not None and self.srv is None:
            raise ValueError("nameserver belongs to srv; host is resolved as the system does it")
        return self

    @property
    def label(self) -> str:
        """What logs and metrics call it."""
        return f"dns {self.srv or f'{self.host}:{self.port}'}"


class KubernetesDiscovery(_Found):
    """The ready endpoints of a service, or the ready pods with certain labels."""

    kind: Literal["kubernetes"]
    service: str | None = None
    """Its EndpointSlices are watched."""
    pods: str | None = None
    """A label selector such as ``app=vllm``; pods are watched."""
    namespace: str | None = None
    """The router's own unless set."""
    port: Port | str | None = None
    """By number or by name; needed where there are several."""
    api: str | None = None
    """``https://HOST:PORT`` of the API server; the cluster's this process runs in unless set."""
    token_file: str | None = None
    """The service account's unless set; read again for every request."""
    ca_file: str | None = None
    """The service account's unless set."""
    resync_s: PositiveFloat = 300.0
    """How often the whole list is read again, whatever the watch told."""

    @model_validator(mode="after")
    def _one(self) -> "KubernetesDiscovery":
        if (self.service is None) == (self.pods is None):
            raise ValueError("expected service (a name) or pods (a label selector)")
        return self

    @field_validator("api")
    @classmethod
    def _http(cls, value: str | None) -> str | None:
        if value is not None and not value.startswith(("http://", "https://")):
            raise ValueError(f"expected https://HOST:PORT, got {value!r}")
        return None if value is None else value.rstrip("/")

    @property
    def label(self) -> str:
        """What logs and metrics call it."""
        what = f"service {self.service}" if self.service else f"pods {self.pods}"
        return f"kubernetes {self.namespace + '/' if self.namespace else ''}{what}"


def _kind(value: Any) -> Any:
    return value.get("kind") if isinstance(value, dict) else getattr(value, "kind", None)


DiscoveryConfig = FileDiscovery | DnsDiscovery | KubernetesDiscovery

_ByKind = Annotated[
    Annotated[FileDiscovery, Tag("file")]
    | Annotated[DnsDiscovery, Tag("dns")]
    | Annotated[KubernetesDiscovery, Tag("kubernetes")],
    Discriminator(
        _kind,
        custom_error_type="kind",
        custom_error_message="expected a mapping with kind: file, dns or kubernetes",
    ),
]


DiscoveryConfigs = Annotated[tuple[_ByKind, ...], BeforeValidator(one_or_several)]


class AdminReplicasConfig(Section):
    """Which replicas may be added through the admin port."""

    allow: Annotated[tuple[str, ...], Field(min_length=1)]
    """Networks (``10.0.0.0/8``) that all addresses of a host must be in, or patterns of host names
    (``*.pods.example``)."""

    @field_validator("allow")
    @classmethod
    def _readable(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for one in value:
            if "/" in one:
                ipaddress.ip_network(one)  # raises ValueError
            elif not one.strip("*.?"):
                raise ValueError(f"{one!r} allows every host; name a domain or a network")
        return value

    @property
    def networks(self) -> list[ipaddress.IPv4Network | ipaddress.IPv6Network]:
        """The networks among ``allow``."""
        return [ipaddress.ip_network(one) for one in self.allow if "/" in one]

    def names(self, host: str) -> bool:
        """Whether one of the patterns fits the host's name."""
        return any(fnmatch.fnmatchcase(host.lower(), one.lower()) for one in self.allow if "/" not in one)
