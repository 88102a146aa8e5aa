"""Where KV events meet (ZMQ): what an endpoint looks like, and who listens on it."""

WILDCARD_HOSTS = ("*", "0.0.0.0", "[::]")


def checked_endpoint(endpoint: str) -> str:
    """The endpoint. Raises ValueError unless it is ``tcp://HOST:PORT`` or ``ipc:///path``."""
    scheme, _, rest = endpoint.partition("://")
    if scheme not in ("tcp", "ipc") or not rest or (scheme == "tcp" and ":" not in rest):
        raise ValueError(f"expected tcp://HOST:PORT or ipc:///path, got {endpoint!r}")
    return endpoint


def is_wildcard(endpoint: str) -> bool:
    """Nobody can connect to it: whoever has it listens, and the other side names this one's host.

    >>> [is_wildcard(endpoint) for endpoint in ("tcp://*:5557", "tcp://[::]:5557", "tcp://10.0.0.1:5557")]
    [True, True, False]
    """
    return endpoint.removeprefix("tcp://").rpartition(":")[0] in WILDCARD_HOSTS
