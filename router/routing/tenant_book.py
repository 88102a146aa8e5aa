"""Every tenant there is, by name, with what it may use and has used."""

from collections.abc import Iterable

from router.routing.quota import Quota, TenantLimits
from router.routing.tenant import Tenant


class TenantBook:
    """Owned by the fleet; empty where no tenants are configured.

    >>> book = TenantBook()
    >>> book.applied([(Tenant("a", weight=2.0), TenantLimits(concurrent=4))], routers=2)
    >>> book.tenant("a").weight, book.tenant("of a newer config").weight
    (2.0, 1.0)
    >>> [book.share, book.sharing(), book.share, book.seen(4), book.alone(), book.share]     # of each limit
    [0.5, None, 1.0, None, None, 0.25]
    """

    __slots__ = ("_configured", "_sharing", "_tenants", "most_routers", "quotas", "share")

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self.quotas: dict[str, Quota] = {}
        """By tenant. One that was taken out while it had requests stays until the next change."""
        self._configured = 1
        """Routers that share the traffic, as the operator said."""
        self.most_routers = 1
        """That were there at once, this one among them, as far as was heard."""
        self._sharing = False
        self.share = 1.0
        """Of each limit, what this router may let pass."""

    def __len__(self) -> int:
        return len(self._tenants)

    def applied(self, tenants: Iterable[tuple[Tenant, TenantLimits]], routers: int = 1) -> None:
        """These are the tenants from now on; who stays keeps what it has in flight and has used.

        ``routers`` share the traffic, or more, if more are heard of.
        """
        self._tenants = {}
        for tenant, limits in tenants:
            self._tenants[tenant.name] = tenant
            quota = self.quotas.get(tenant.name)
            if quota is None:
                self.quotas[tenant.name] = Quota(limits)
            else:
                quota.limits_changed(limits)
        for name in [name for name, quota in self.quotas.items() if quota.unused]:
            if name not in self._tenants:
                del self.quotas[name]
        self._configured = routers
        self._set_share()

    def tenant(self, name: str) -> Tenant:
        """The tenant of that ``name``; one that is not known here has the usual settings."""
        return self._tenants.get(name) or Tenant(name)

    def one_of(self, namespace: str) -> str:
        """A tenant whose cached prefixes are in ``namespace``; "" if there is none."""
        same = self._tenants.get(namespace)
        if same is not None and same.namespace == namespace:
            return namespace
        return next((name for name, one in self._tenants.items() if one.namespace == namespace), "")

    # --- how far the routers know of one another ------------------------------------------------

    def sharing(self) -> None:
        """Every router hears what the others let pass: each limit is one for all."""
        self._sharing = True
        self._set_share()

    def alone(self) -> None:
        """They do not: this one keeps to its part of each limit, of the most it heard of or as configured."""
        self._sharing = False
        self._set_share()

    def seen(self, routers: int) -> None:
        """So many were there at once, this one among them."""
        if routers > self.most_routers:
            self.most_routers = routers
            self._set_share()

    def _set_share(self) -> None:
        self.share = 1.0 if self._sharing else 1.0 / max(self.most_routers, self._configured)
        for quota in self.quotas.values():
            quota.share = self.share
