"""The keys under ``state:``: what outlives a router, and what several routers share."""

from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field, PositiveFloat, field_serializer, field_validator, model_validator

from router.config_values import Address, Secret, Section, masked_url, without_credentials


class SentinelConfig(Section):
    """Sentinels that know which Redis is the master; ``state.url`` then tells all but the host."""

    service: str
    hosts: Annotated[tuple[Address, ...], Field(min_length=1)]
    username: str | None = None
    password: Secret | None = None
    """The sentinels' own."""


class RedisTlsConfig(Section):
    """For ``rediss://`` beyond what the system trusts."""

    ca: str | None = None
    """PEM file of the authority, or of the server's own certificate."""
    cert: str | None = None
    """This router's own certificate, if the server asks for one."""
    key: str | None = None
    """Its private key; in ``cert`` unless set."""
    insecure: bool = False
    """Trust whoever answers. For tests."""


class StateConfig(Section):
    """What outlives this router, and what several routers share (docs/operations.md, Several routers)."""

    kind: Literal["memory", "redis"] = "memory"
    snapshot: str | None = None
    """A file that is written now and then and at the end, and read at the start (``redis``: unless another
    router tells more)."""
    snapshot_interval_s: PositiveFloat = 30.0
    url: str | None = None
    """``redis``: ``redis://[USER:PASSWORD@]HOST[:PORT][/DB]``, ``rediss://`` for TLS, ``unix:///path``."""
    username: str | None = None
    password: Secret | None = None
    sentinel: SentinelConfig | None = None
    cluster: bool = False
    """``url`` is any node of a Redis Cluster."""
    tls: RedisTlsConfig | None = None
    namespace: Annotated[str, Field(min_length=1, max_length=100)] = "warmroute"
    """Prefix of all keys. Routers of one fleet have the same, other fleets in that Redis another."""
    lease_s: Annotated[float, Field(ge=0.5, le=300)] = 5.0
    """A router that is not heard for so long is gone, and with it all it had in flight."""
    flush_ms: Annotated[float, Field(ge=1, le=1_000)] = 5.0
    """News is sent at once, but never so soon after what was sent before: it is gathered meanwhile."""
    timeout_ms: PositiveFloat = 1_000.0
    """For each command. Requests never wait for one."""

    def without_credentials(self) -> "StateConfig":
        """What a running router cannot change: all but what it logs in with."""
        nobody: dict[str, object] = {"username": None, "password": None}
        url = None if self.url is None else without_credentials(self.url)
        sentinel = None if self.sentinel is None else self.sentinel.model_copy(update=nobody)
        return self.model_copy(update=nobody | {"url": url, "sentinel": sentinel})

    @field_validator("url")
    @classmethod
    def _redis(cls, value: str | None) -> str | None:
        if value is None:
            return None
        parts = urlsplit(value)
        if parts.scheme not in ("redis", "rediss", "unix") or not (parts.hostname or parts.path):
            raise ValueError("expected redis://HOST:PORT, rediss://HOST:PORT or unix:///path")
        _ = parts.port  # raises ValueError when out of range
        if parts.query or parts.fragment:
            raise ValueError("options after ? are not read; use the keys of state")
        return value

    @field_serializer("url", when_used="json")
    def _masked(self, value: str | None) -> str | None:
        return None if value is None else masked_url(value)

    @model_validator(mode="after")
    def _fits(self) -> "StateConfig":
        belong = set(type(self).model_fields)
        if self.kind == "memory":
            belong = {"snapshot", "snapshot_interval_s"}
        other = sorted(  # a default that is written out, as --check does, asks for nothing
            name
            for name in self.model_fields_set - belong - {"kind"}
            if getattr(self, name) != type(self).model_fields[name].default
        )
        if other:
            raise ValueError(f"{', '.join(other)}: not for kind {self.kind}; remove, or change kind")
        if self.kind == "redis":
            self._check_redis()
        return self

    def _check_redis(self) -> None:
        if self.url is None:
            raise ValueError("kind redis needs url: redis://HOST:PORT")
        parts = urlsplit(self.url)
        for key, given in (("username", parts.username), ("password", parts.password)):
            if given and getattr(self, key) is not None:
                raise ValueError(f"{key} is given twice, in url and in {key}; remove one")
        if self.cluster and (self.sentinel is not None or parts.scheme == "unix"):
            raise ValueError("cluster goes neither with sentinel nor with a unix socket")
        if self.tls is not None and parts.scheme != "rediss":
            raise ValueError("tls needs url: rediss://…")
