"""Whose key a request carries, and what follows from it: tenant, priority, models, cache salt, quota."""

import os
from collections.abc import Iterable
from hashlib import blake2b

from replica.contract.cache_salt import derived_salt, signed_salt
from router.config import KeysConfig
from router.proxy.counters import Counters, TenantCounters
from router.proxy.key_ring import bearer_token
from router.proxy.path_rules import plain_path
from router.proxy.router_error import (
    KEY_MISSING,
    KEY_OF_OTHER_PORT,
    KEY_UNKNOWN,
    MODEL_NOT_ALLOWED,
    RouterError,
    limit_reached,
)
from router.routing.prompt_blocks import Prompt
from router.routing.quota import Quota
from router.routing.tenant import Tenant
from router.routing.tenant_book import TenantBook
from router.tenants_config import PUBLIC, TenantConfig, TenantsConfig

_ALL_MODELS = b"/v1/models"
_ONE_MODEL = _ALL_MODELS + b"/"
HOLD_ROOM = 4.0
"""A tenant may hold, and receive, so many times the room that is left for all: alone four fifths of it, and
always a place is left for one that comes later (dynamic thresholds, Choudhury and Hahne 1998)."""


class Caller:
    """What all requests with one key have in common."""

    __slots__ = ("_own_salt", "_salts", "counters", "models", "priority", "quota", "tenant")

    def __init__(
        self,
        tenant: Tenant,
        quota: Quota,
        counters: TenantCounters,
        salts: "Salts",
        *,
        priority: int = 0,
        models: frozenset[str] | None = None,
    ) -> None:
        """``models``: those it may use; all if ``None``."""
        self.tenant = tenant
        self.quota = quota
        self.counters = counters
        self.priority = priority
        self.models = models
        self._salts = salts
        self._own_salt = salts.salt(tenant.namespace, None)

    def salt(self, own: str | None) -> str:
        """The cache salt of its requests; ``own``: what the client asked to be kept apart by within that."""
        return self._own_salt if own is None else self._salts.salt(self.tenant.namespace, own)

    def model_refusal(self, model: str | None) -> RouterError | None:
        """Why it may not use ``model``; without a name the engine's own choice, which it may not if bound."""
        return None if self.models is None or model in self.models else MODEL_NOT_ALLOWED

    def path_refusal(self, path: bytes) -> RouterError | None:
        """Why it may not ask a replica for ``path``: what ``/v1/models`` leaves out it is not told of."""
        if self.models is None:
            return None
        plain = plain_path(path)
        if plain is None:
            return MODEL_NOT_ALLOWED
        spelt = plain.lower()
        if spelt == _ALL_MODELS:  # the replica's own list, with all it has
            return MODEL_NOT_ALLOWED
        if not spelt.startswith(_ONE_MODEL):
            return None
        return self.model_refusal(plain[len(_ONE_MODEL) :].decode("utf-8", "replace"))

    def refusal(self, now: float) -> RouterError | None:
        """The limit of its tenant that one more request would break."""
        return self._broken(self.quota.refusal(now))

    def arrival_refusal(self) -> RouterError | None:
        """The limit of its tenant that one more body would break, if it began to arrive."""
        return self._broken(self.quota.arrival_refusal())

    def _broken(self, limit_and_wait: tuple[str, float] | None) -> RouterError | None:
        if limit_and_wait is None:
            return None
        limit, wait_s = limit_and_wait
        return limit_reached(limit, getattr(self.quota.limits, limit), wait_s)

    def may_receive(self, room: int) -> bool:
        """Its bodies that are not whole yet leave enough of the ``room`` (bytes) that is left for all."""
        return self.quota.arriving_bytes <= HOLD_ROOM * self.tenant.weight * room

    def may_hold(self, room: int) -> bool:
        """One more of its requests may wait in the router, where ``room`` more of all may."""
        return self.quota.held < HOLD_ROOM * self.tenant.weight * room

    def owned(self, prompt: Prompt) -> Prompt:
        """``prompt``, a fresh one, as this caller's."""
        prompt.tenant = self.tenant
        prompt.priority = self.priority
        return prompt


class Salts:
    """Derives cache salts, and signs them if replicas want that."""

    __slots__ = ("_secret", "_signing_key")

    def __init__(self, config: TenantsConfig) -> None:
        key = config.salt_signing_key
        self._secret = config.salt_secret.get_secret_value().encode()
        self._signing_key = None if key is None else key.get_secret_value().encode()

    def salt(self, namespace: str, own: str | None) -> str:
        """See ``replica.contract.cache_salt``."""
        salt = derived_salt(self._secret, namespace, own)
        return salt if self._signing_key is None else signed_salt(salt, self._signing_key)


class Tenancy:
    """The tenants of one config. Keys are kept as keyed digests under a key that nobody knows: neither which
    one is looked up nor how long that takes tells anything of them."""

    __slots__ = ("_admins", "_by_key", "_by_name", "_digest_key", "isolates")

    def __init__(
        self,
        config: TenantsConfig,
        tenants: Iterable[TenantConfig],
        keys: KeysConfig,
        book: TenantBook,
        counters: Counters,
    ) -> None:
        """Brings ``book`` and ``counters`` up to date. ``keys``: of no tenant, and of the admin port."""
        self._digest_key = os.urandom(32)
        salts = Salts(config)
        public = TenantConfig(name=PUBLIC, keys=())
        known = [(one, *config.routing_tenant(one)) for one in (public, *tenants)]
        book.applied([(tenant, limits) for _, tenant, limits in known], config.routers or 1)
        counters.keep_tenants(book.quotas)
        self._by_key: dict[bytes, Caller] = {}
        self._by_name: dict[str, Caller] = {}
        for one, tenant, _ in known:
            quota, counted = book.quotas[tenant.name], counters.tenants[tenant.name]
            models = None if one.models is None else frozenset(one.models)
            self._by_name[tenant.name] = Caller(tenant, quota, counted, salts, models=models)
            for key in one.keys:
                self._by_key[self._digest(key.key.get_secret_value().encode())] = Caller(
                    tenant, quota, counted, salts, priority=key.priority, models=models
                )
        for shared in keys.public:
            self._by_key[self._digest(shared.get_secret_value().encode())] = self._by_name[PUBLIC]
        self._admins = {self._digest(key.get_secret_value().encode()) for key in keys.admin}
        callers = self._by_key.values()
        self.isolates = config.isolation == "strict" and len({one.tenant.namespace for one in callers}) > 1
        """Who shares no salt must share no prefix cache, and there are such callers."""

    def caller(self, authorization: bytes | None) -> Caller | RouterError:
        """Whose key stands in ``Authorization``, or what a request with it is told."""
        token = bearer_token(authorization)
        if token is None:
            return KEY_MISSING
        given = self._digest(token)
        caller = self._by_key.get(given)
        if caller is not None:
            return caller
        return KEY_OF_OTHER_PORT if given in self._admins else KEY_UNKNOWN

    def named(self, name: str) -> Caller | None:
        """The tenant of that name, as with a key of no priority: for reports."""
        return self._by_name.get(name)

    @property
    def names(self) -> list[str]:
        """All tenants, in the config's order."""
        return list(self._by_name)

    def _digest(self, key: bytes) -> bytes:
        return blake2b(key, key=self._digest_key, digest_size=32).digest()
