"""Replicas as the gateway names them: by IP address and port."""

import logging
from ipaddress import ip_address
from urllib.parse import urlsplit

from router.routing.fleet import Fleet
from router.routing.replica_state import ReplicaState

logger = logging.getLogger("warmroute.picker")

_PORTS = {"http": 80, "https": 443}


def endpoint_of(url: str) -> str | None:
    """``IP:PORT`` of a replica's URL, ``[IP]:PORT`` for IPv6; ``None``: its host is a name.

    >>> endpoint_of("http://10.0.0.1:8000"), endpoint_of("https://[2001:DB8::0:1]")
    ('10.0.0.1:8000', '[2001:db8::1]:443')
    >>> endpoint_of("http://vllm-0.vllm:8000") is None
    True
    """
    parts = urlsplit(url)
    try:
        address = ip_address(parts.hostname or "")
    except ValueError:
        return None
    host = f"[{address.compressed}]" if address.version == 6 else address.compressed
    return f"{host}:{parts.port or _PORTS[parts.scheme]}"


class Endpoints:
    """The endpoints of a fleet's replicas, and which replicas a request may go to."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._known: dict[ReplicaState, str | None] = {}
        self._nameless = 0
        """Replicas in ``_known`` that have none."""

    def of(self, replica: ReplicaState) -> str | None:
        """Its endpoint; ``None``: it has none, and gets no work."""
        if replica not in self._known:
            endpoint = self._known[replica] = endpoint_of(replica.spec.url)
            if endpoint is None:
                self._nameless += 1
                logger.warning(
                    "replica %s (%s) gets no requests: a gateway knows its endpoints by IP address; name it "
                    "by that, or have it found (discovery: - kind: dns)",
                    replica.name,
                    replica.spec.url,
                )
        return self._known[replica]

    def forget_departed(self) -> None:
        """Keep nothing of replicas that are no longer in the fleet."""
        gone = [replica for replica in self._known if replica not in self._fleet.replicas]
        for replica in gone:
            self._nameless -= self._known.pop(replica) is None

    def within(self, subset: frozenset[str] | None) -> frozenset[int] | None:
        """Indexes of the replicas that may have a request, if it is one for ``subset``; ``None``: all."""
        named = {replica.index: self.of(replica) for replica in self._fleet.replicas}
        if subset is None and not self._nameless:
            return None
        return frozenset(
            index for index, one in named.items() if one is not None and (subset is None or one in subset)
        )

    def at(self, endpoint: str) -> list[ReplicaState]:
        """The replicas at ``endpoint``: none, one, or also those that were removed and still answer."""
        return [replica for replica in self._fleet.replicas if self.of(replica) == endpoint]
