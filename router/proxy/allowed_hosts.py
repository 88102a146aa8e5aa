"""Which hosts may be added as replicas through the admin port. No I/O: names were resolved before."""

from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from router.discovery_config import AdminReplicasConfig

METADATA = tuple(
    ip_network(one)
    for one in (
        "169.254.0.0/16",  # link-local; the metadata services of most clouds
        "fe80::/10",
        "fd00:ec2::254/128",  # AWS
        "100.100.100.200/32",  # Alibaba
        "168.63.129.16/32",  # Azure
        "192.0.0.192/32",  # Oracle
        "fd20:ce::254/128",  # Google
    )
)
"""Never allowed, whatever the config says: what answers there gives out credentials."""
_IPV4_AT_THE_END = tuple(
    ip_network(one)
    for one in (
        "64:ff9b::/96",  # NAT64
        "64:ff9b:1::/48",  # NAT64 of a site's own
        "::/96",  # IPv4-compatible
        "::ffff:0:0:0/96",  # IPv4-translated
    )
)
"""Networks of IPv6 whose last 32 bits are an address of IPv4."""


class NotAllowed(Exception):
    """This host may not be a replica: says why."""


def require_allowed(host: str, found: Iterable[str], allowed: AdminReplicasConfig) -> None:
    """Raise ``NotAllowed`` unless all addresses ``found`` for ``host`` may be used.

    >>> require_allowed("a.pods", ["10.0.0.1"], AdminReplicasConfig(allow=("10.0.0.0/8",)))
    >>> require_allowed("a.pods", ["10.0.0.1", "192.168.0.1"], AdminReplicasConfig(allow=("10.0.0.0/8",)))
    Traceback (most recent call last):
    router.proxy.allowed_hosts.NotAllowed: a.pods (192.168.0.1): not in admin_replicas.allow
    """
    some = False
    named = allowed.names(host)
    for text in found:
        some = True
        address = _plain(text)
        who = host if host == text else f"{host} ({text})"
        if any(address in network for network in METADATA):
            raise NotAllowed(f"{who}: link-local and metadata addresses are never replicas")
        if any(address in network for network in allowed.networks):
            continue
        if not named:
            raise NotAllowed(f"{who}: not in admin_replicas.allow")
        if address.is_loopback or address.is_unspecified or address.is_multicast:
            raise NotAllowed(f"{who}: is no address of another host; to allow it, name its network")
    if not some:
        raise NotAllowed(f"{host}: has no address")


def _plain(text: str) -> IPv4Address | IPv6Address:
    """IPv4 addresses that are written as IPv6 ones count as what they are."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            return address.ipv4_mapped
        if address.sixtofour is not None:
            return address.sixtofour
        here = address.is_loopback or address.is_unspecified
        if not here and any(address in network for network in _IPV4_AT_THE_END):
            return IPv4Address(int(address) & 0xFFFFFFFF)
    return address
