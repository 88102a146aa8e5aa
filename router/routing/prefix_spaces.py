"""The namespaces of a prefix index, and which of them has the least recently used hold of a replica."""

from collections.abc import Iterator
from heapq import heappop, heappush, heapreplace

from router.routing.prefix_node import Hold, Space
from router.routing.tenant import Tenant


class Spaces:
    """Changed by the index alone. A namespace is there from its first hold until some time after its last.

    >>> spaces = Spaces()
    >>> spaces.add_replica()
    >>> for name in "a", "b":
    ...     hold = Hold(0)
    ...     hold.tick = spaces.next_tick()
    ...     hold.link(spaces.entered(0, None, Tenant(name)).rings[0])
    >>> oldest = spaces.oldest(0)
    >>> oldest.tick, oldest.unlink(), spaces.oldest(0).tick, [space.name for space in spaces.of(0)]
    (1, None, 2, ['b'])
    """

    __slots__ = ("_by_name", "_order", "_tick", "nobodys")

    def __init__(self) -> None:
        self.nobodys = Space("")
        """Where tenants are not told apart."""
        self._by_name = {"": self.nobodys}
        self._tick = 0
        self._order: list[list[tuple[int, str]]] = []
        """By replica: each space with a ring there, once, at a tick no later than its oldest hold's."""

    def add_replica(self) -> None:
        """Make room for one more."""
        self._order.append([])

    def next_tick(self) -> int:
        """The time of one more use by a tenant."""
        self._tick += 1
        return self._tick

    def entered(self, replica: int, known: Space | None, tenant: Tenant | None) -> Space:
        """The space of ``tenant``, or the one that is ``known``, with a ring for ``replica``."""
        if tenant is None:
            space = self.nobodys
        else:
            space = known or self._by_name.get(tenant.namespace) or Space(tenant.namespace)
            self._by_name[space.name] = space
        if replica not in space.rings:
            space.add_ring(replica)
            heappush(self._order[replica], (0 if tenant is None else self._tick, space.name))
        return space

    def held(self, replica: int, namespace: str) -> int:
        """Units of the namespace that ``replica`` holds."""
        space = self._by_name.get(namespace)
        return 0 if space is None else space.held.get(replica, 0)

    def of(self, replica: int) -> Iterator[Space]:
        """Those in which ``replica`` holds something, or did lately."""
        for _, name in self._order[replica]:
            yield self._by_name[name]

    def oldest(self, replica: int) -> Hold | None:
        """The least recently used hold of ``replica``, whosever it is."""
        order = self._order[replica]
        while order:
            tick, name = order[0]
            space = self._by_name[name]
            ring = space.rings[replica]
            oldest = ring.newer
            if oldest is ring:
                heappop(order)
                self._drop_ring(space, replica)
            elif len(order) == 1 or oldest.tick == tick:
                return oldest
            else:
                heapreplace(order, (oldest.tick, name))
        return None

    def emptied(self, replica: int) -> None:
        """``replica`` holds nothing any more."""
        for _, name in self._order[replica]:
            self._drop_ring(self._by_name[name], replica)
        self._order[replica].clear()

    def _drop_ring(self, space: Space, replica: int) -> None:
        del space.rings[replica]
        space.held.pop(replica, None)
        if not space.rings and space is not self.nobodys:
            del self._by_name[space.name]

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if rings and order disagree. O(namespaces x replicas)."""
        for replica, order in enumerate(self._order):
            rings = [name for name, space in self._by_name.items() if replica in space.rings]
            assert sorted(rings) == sorted(name for _, name in order), "order"
            for tick, name in order:
                ring = self._by_name[name].rings[replica]
                assert ring.newer is ring or ring.newer.tick >= tick, "older than the order says"
        assert all(self._by_name[space.name] is space for space in self._by_name.values()), "names"
