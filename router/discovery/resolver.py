"""Names to addresses, as the system does it, and SRV records."""

import asyncio
import socket
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dns.asyncresolver import Resolver

_EMPTY = {socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)}
"""What the system calls an answer without any address."""


async def addresses(host: str, port: int, limit_s: float) -> list[str]:
    """All addresses of ``host``, sorted; none if the name has none.

    Raises ``OSError`` if there is no answer, ``TimeoutError`` included.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(limit_s):
            found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        if error.errno in _EMPTY:
            return []
        raise
    return sorted({str(address[0]) for *_, address in found})


async def service_targets(name: str, nameserver: str | None, limit_s: float) -> list[tuple[str, int]]:
    """Hosts and ports of the SRV record ``name``, those of the first priority, each once, sorted.

    Names are in lower case: resolvers change it from answer to answer. Records that name no place (RFC 2782:
    the target ``.`` says that there is no such service) do not count. ``nameserver``: HOST:PORT, the system's
    if ``None``. Raises ``OSError`` if there is no answer.
    """
    import dns.exception
    import dns.name
    import dns.resolver

    try:
        answer = await _resolver(nameserver).resolve(name, "SRV", lifetime=limit_s, search=True)
    except (dns.resolver.NXDOMAIN, dns.resolver.NoAnswer):
        return []
    except dns.exception.DNSException as error:
        raise OSError(str(error) or type(error).__name__) from None
    records = [one for one in answer if one.port and one.target != dns.name.root]
    first = min((one.priority for one in records), default=0)
    places = {
        (one.target.to_text().rstrip(".").lower(), one.port) for one in records if one.priority == first
    }
    return sorted(places)


def _resolver(nameserver: str | None) -> "Resolver":
    """Made anew for each question: the system's settings may have changed."""
    from dns.asyncresolver import Resolver

    if nameserver is None:
        return Resolver()
    resolver = Resolver(configure=False)
    host, _, port = nameserver.rpartition(":")
    resolver.nameservers, resolver.port = [host.strip("[]")], int(port)
    return resolver
