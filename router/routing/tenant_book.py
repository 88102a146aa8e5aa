"""Every tenant there is, by name, with what it may use and has used."""

from collections.abc import Iterable

from router.routing.quota import Quota, TenantLimits
from router.routing.tenant import Tenant


class TenantBook:
    """Owned by the fleet; empty where no tenants are configured.

    >>> book = TenantBook()
    >>> book.applied([(Tenant("a", weight=2.0), TenantLimits(concurrent=4))])
    >>> book.tenant("a").weight, book.tenant("of a newer config").weight
    (2.0, 1.0)
    """

    __slots__ = ("_share", "_tenants", "quotas")

    def __init__(self) -> None:
        self._tenants: dict[str, Tenant] = {}
        self._share = 1.0
        self.quotas: dict[str, Quota] = {}
        """By tenant. One that was taken out while it had requests stays until the next change."""

    def __len__(self) -> int:
        return len(self._tenants)

    def applied(self, tenants: Iterable[tuple[Tenant, TenantLimits]]) -> None:
        """These are the tenants from now on; who stays keeps what it has in flight and has used."""
        self._tenants = {}
        for tenant, limits in tenants:
            self._tenants[tenant.name] = tenant
            quota = self.quotas.get(tenant.name)
            if quota is None:
                quota = self.quotas[tenant.name] = Quota(limits)
                quota.share = self._share
            else:
                quota.limits_changed(limits)
        for name in [name for name, quota in self.quotas.items() if quota.unused]:
            if name not in self._tenants:
                del self.quotas[name]

    def tenant(self, name: str) -> Tenant:
        """The tenant of that ``name``; one that is not known here has the usual settings."""
        return self._tenants.get(name) or Tenant(name)

    @property
    def share(self) -> float:
        """Of each limit, what this router may let pass: 1 while it hears the other routers."""
        return self._share

    @share.setter
    def share(self, share: float) -> None:
        self._share = share
        for quota in self.quotas.values():
            quota.share = share
