"""Whom a request may name as the source of its KV: what the operator allows, or a router with the key signs.

Whoever can reach a replica could otherwise have it open connections to any address.
"""

import fnmatch
import ipaddress
from collections.abc import Iterable
from dataclasses import dataclass

from replica.contract.kv_source import read_kv_source
from replica.kv_cache.tier_transport import PeerOffer

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
MOST_BLOCKS = 2**31
"""More than any prompt has: the source may hold all of it."""


@dataclass(frozen=True, slots=True)
class AllowedPeers:
    """One entry of the list: ``HOST:PORT``, where HOST is a network, an address, or a pattern of names.

    An address is compared with networks, a name with patterns: a name is never resolved to find out.

    >>> AllowedPeers.read("10.0.0.0/8:8400").allows("10.1.2.3", 8400), AllowedPeers.read("*.pods:8400").port
    (True, 8400)
    >>> AllowedPeers.read("*.pods:8400").allows("a.pods", 8401)
    False
    >>> AllowedPeers.read("[fd00::1]:1").allows("fd00::1", 1)
    True
    """

    network: Network | None
    pattern: str
    port: int

    @classmethod
    def read(cls, entry: str) -> "AllowedPeers":
        """Raises ValueError for what is none."""
        host, _, port = entry.rpartition(":")
        host = host.strip("[]")
        if not host or not port.isdigit() or not 0 < int(port) <= 65_535:
            raise ValueError(f"expected HOST:PORT, NETWORK/BITS:PORT or *.NAME:PORT, got {entry!r}")
        try:
            return cls(ipaddress.ip_network(host), "", int(port))
        except ValueError:
            if "/" in host or not host.strip("*.?"):
                raise ValueError(f"{entry!r} is no network, or allows every host; name one") from None
            return cls(None, host.lower(), int(port))

    def allows(self, host: str, port: int) -> bool:
        """Whether this entry allows that address."""
        if port != self.port:
            return False
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return self.network is None and fnmatch.fnmatchcase(host.lower(), self.pattern)
        return self.network is not None and address in self.network


@dataclass(slots=True)
class SourceCounters:
    """Requests that named a source."""

    taken: int = 0
    refused: int = 0
    """Neither allowed nor signed."""
    malformed: int = 0


class SourceRule:
    """Reads the header ``x-warmroute-kv-source`` for one replica; what it may not obey it ignores.

    >>> rule = SourceRule(["10.0.0.0/8:8400"], None, block_tokens=16)
    >>> rule.offer("10.0.0.7:8400; tokens=100"), rule.offer("169.254.169.254:80"), rule.offer(None)
    (PeerOffer(name='10.0.0.7:8400', blocks=6), None, None)
    >>> rule.counters
    SourceCounters(taken=1, refused=1, malformed=0)
    """

    def __init__(self, allow: Iterable[str], router_key: bytes | None, *, block_tokens: int) -> None:
        """Raises ValueError for an entry that cannot be read."""
        self._allowed = [AllowedPeers.read(entry) for entry in allow]
        self._key = router_key
        self._block_tokens = block_tokens
        self.counters = SourceCounters()

    def offer(self, value: str | None) -> PeerOffer | None:
        """Who may be asked for how many blocks, by the header's ``value``."""
        if value is None:
            return None
        source = read_kv_source(value)
        if source is None:
            self.counters.malformed += 1
            return None
        host, _, port = source.address.rpartition(":")
        signed = self._key is not None and source.signed_by(self._key)
        if not signed and not any(one.allows(host.strip("[]"), int(port)) for one in self._allowed):
            self.counters.refused += 1
            return None
        self.counters.taken += 1
        blocks = MOST_BLOCKS if source.tokens is None else source.tokens // self._block_tokens
        return PeerOffer(source.address, blocks)
