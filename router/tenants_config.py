"""The keys under ``tenants:`` in the router's YAML, and those of each tenant."""

from collections import Counter
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator, model_validator

from replica.contract.cache_salt import LEAST_SECRET_CHARACTERS
from router.config_values import Secret, Section, one_or_several
from router.routing.quota import TenantLimits
from router.routing.tenant import Tenant

PUBLIC = "public"
"""The tenant of those who use the port with one of ``keys.public``."""
MOST_TENANTS = 10_000

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]


class TenantKeyConfig(Section):
    """One of a tenant's keys."""

    key: Secret
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    """Among the tenant's own requests that wait in the router: lower goes sooner."""


class TenantLimitsConfig(Section):
    """What a tenant may use of the whole fleet."""

    requests_per_s: PositiveFloat | None = None
    tokens_per_s: PositiveFloat | None = None
    """Of prompts, cached or not, and of replies."""
    concurrent: PositiveInt | None = None
    """Requests arriving, held or in flight."""


def _keys(value: Any) -> Any:
    """A key alone, as text or ``{file: PATH}``, stands for one without a priority of its own."""
    value = one_or_several(value)
    if not isinstance(value, list | tuple):
        return value
    return [one if isinstance(one, dict) and "key" in one else {"key": one} for one in value]


class TenantConfig(Section):
    """One tenant."""

    name: Name
    keys: Annotated[tuple[TenantKeyConfig, ...], BeforeValidator(_keys)]
    weight: Annotated[float, Field(ge=0.01, le=1_000)] = 1.0
    """Its part of the fleet when that is busy, against the other tenants' weights."""
    limits: TenantLimitsConfig = TenantLimitsConfig()
    models: tuple[str, ...] | None = None
    """The models it may use; all unless set."""
    group: Name | None = None
    """Tenants of one group share cached prefixes."""
    index_share: Annotated[float, Field(gt=0, le=1)] | None = None
    """Of each replica's prefix index, what it may fill; ``tenants.index_share`` unless set."""


class TenantsConfig(Section):
    """Who shares the fleet. Without it nobody is told from anybody."""

    salt_secret: Secret
    """Cache salts are derived from the tenant with this; the same in every router."""
    salt_signing_key: Secret | None = None
    """Shared with replicas that take signed salts only."""
    file: str | None = None
    """A YAML list of tenants, watched."""
    interval_s: PositiveFloat = 1.0
    """How often it is looked whether the file changed."""
    members: tuple[TenantConfig, ...] = ()
    """Tenants that are written here."""
    isolation: Literal["strict", "warn"] = "strict"
    """Where an engine reads no cache salt tenants would share its prefix cache. ``strict``: their requests go
    to other replicas, or are refused; ``warn``: they go there, and the log says so."""
    index_share: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Of each replica's prefix index, what one tenant or group may fill."""
    routers: PositiveInt | None = None
    """That share the traffic, at most: each keeps to its part of every limit while they cannot tell one
    another, and counts as many as it ever heard of at once if these were more. ``None``, with
    ``state.kind: memory`` alone: one."""

    @field_validator("salt_secret", "salt_signing_key")
    @classmethod
    def _long(cls, value: Secret | None) -> Secret | None:
        if value is not None and len(value.get_secret_value()) < LEAST_SECRET_CHARACTERS:
            raise ValueError(
                f"expected at least {LEAST_SECRET_CHARACTERS} characters; try `openssl rand -hex 32`"
            )
        return value

    @model_validator(mode="after")
    def _some(self) -> "TenantsConfig":
        if self.file is None and not self.members:
            raise ValueError("expected file or members: who the tenants are")
        problem = problem_among(self.members)
        if problem is not None:
            raise ValueError(f"members: {problem}")
        return self

    def routing_tenant(self, tenant: TenantConfig) -> tuple[Tenant, TenantLimits]:
        """``tenant`` as the routing core knows it."""
        limits = tenant.limits
        return (
            Tenant(
                tenant.name,
                # No name may have a space: a group is nobody's name.
                namespace=tenant.name if tenant.group is None else f"group {tenant.group}",
                weight=tenant.weight,
                index_share=tenant.index_share or self.index_share,
            ),
            TenantLimits(limits.requests_per_s, limits.tokens_per_s, limits.concurrent),
        )


def problem_among(tenants: tuple[TenantConfig, ...]) -> str | None:
    """What forbids these tenants side by side, without any key in it."""
    if len(tenants) > MOST_TENANTS:
        return f"{len(tenants)} tenants; at most {MOST_TENANTS}"
    names = Counter(tenant.name for tenant in tenants)
    twice = sorted(name for name, count in names.items() if count > 1)
    if twice:
        return f"names must differ; twice: {', '.join(twice)}"
    if PUBLIC in names:
        return f"the name {PUBLIC} is taken by those who use keys.public; choose another"
    owners: dict[str, str] = {}
    for tenant in tenants:
        for one in tenant.keys:
            owner = owners.setdefault(one.key.get_secret_value(), tenant.name)
            if owner != tenant.name:
                return f"{owner} and {tenant.name} have the same key; give each its own"
    return None
