"""Keeps web pages away from an admin port that has no keys.

A browser on a machine that reaches the port will send it what any page asks for. A page of another origin is
told by ``Origin`` and ``Sec-Fetch-Site``; one whose own name was made to resolve to this port (DNS rebinding)
by ``Host``: it has to be a name that is not for sale.
"""

from collections.abc import Collection, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit


def foreign_page(headers: Mapping[str, str], hosts: Collection[str], listen: str) -> str | None:
    """Why a request with these headers is refused; None: it may pass.

    ``hosts``: domain names by which the port is reached (lower case); ``listen``: the port's own address.
    Addresses, ``localhost`` and names without a dot are nobody's domain. Following a link is no harm.

    >>> def why(**headers: str) -> str | None:
    ...     return foreign_page({name.replace("_", "-"): text for name, text in headers.items()}, (), ":8081")
    >>> why(host="10.0.0.7:8081", origin="http://10.0.0.7:8081") is None
    True
    >>> why(host="evil.example:8081", sec_fetch_site="same-origin")
    'Host evil.example: no name of this port; to allow it, add it to admin_hosts'
    >>> why(host="localhost:8081", origin="https://evil.example")
    'a page of https://evil.example may not ask this port'
    """
    if listen.startswith("unix:"):
        return None  # no browser comes this way
    host, origin = headers.get("host", ""), headers.get("origin")
    name = _name(host)
    if not _is_own(name, listen) and name not in hosts:
        return f"Host {name or '(none)'}: no name of this port; to allow it, add it to admin_hosts"
    if origin is not None:
        asked_by = origin.lower().partition("://")[2]
        foreign = asked_by != host.lower() and _name(asked_by) not in hosts
    else:
        of_other_site = headers.get("sec-fetch-site", "none") not in ("same-origin", "none")
        foreign = of_other_site and headers.get("sec-fetch-mode") != "navigate"
    if foreign:
        return f"a page of {origin or 'another site'} may not ask this port"
    return None


def _name(host: str) -> str:
    """``host`` without its port and brackets, in lower case."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return ""


def _is_own(name: str, listen: str) -> bool:
    if not name:
        return False
    try:
        ip_address(name)
    except ValueError:
        return "." not in name or name.endswith(".localhost") or name == _name(listen)
    return True
