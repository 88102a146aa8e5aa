"""Whose a request is: the tenant as the routing core knows it."""


class Tenant:
    """Immutable. A reload makes new ones; requests keep the one they began with."""

    __slots__ = ("index_share", "name", "namespace", "weight")

    def __init__(
        self, name: str, *, namespace: str | None = None, weight: float = 1.0, index_share: float = 1.0
    ) -> None:
        self.name = name
        self.namespace = name if namespace is None else namespace
        """Shared by tenants that share cached prefixes: they have one cache salt."""
        self.weight = weight
        """Its part of a busy fleet, against the other tenants' weights."""
        self.index_share = index_share
        """Of a replica's prefix index, what its namespace may fill at most."""
