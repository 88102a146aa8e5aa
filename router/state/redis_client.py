"""From the config to a Redis client, and from what a client raises to words for the operator."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from redis.asyncio import Redis, RedisCluster
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import Sentinel
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    ClusterDownError,
    MasterDownError,
    NoPermissionError,
    OutOfMemoryError,
    ReadOnlyError,
    RedisClusterException,
    RedisError,
    ResponseError,
)
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import TimeoutError as RedisTimeoutError

from router.state_config import StateConfig

Client = Any
"""``Redis`` or ``RedisCluster``; both have the few commands used here."""

FAULTS = (RedisError, RedisClusterException, OSError, TimeoutError)
"""What any use of a client may raise."""


def connect(config: StateConfig, *, wait_s: float = 0.0) -> Client:
    """A client that has not connected yet. Nothing it does is tried twice; close it with ``aclose``.

    ``wait_s``: how long its commands may let the server wait (XREAD, BLPOP).
    """
    assert config.url is not None, "checked by the config"
    timeout_s = config.timeout_ms / 1_000.0
    options: dict[str, Any] = {
        "socket_connect_timeout": timeout_s,
        "socket_timeout": timeout_s + wait_s,
        "retry": Retry(NoBackoff(), 0),
        "protocol": 2,
    }
    if config.username is not None:
        options["username"] = config.username
    if config.password is not None:
        options["password"] = config.password.get_secret_value()
    options |= _tls(config)
    if config.cluster:
        return RedisCluster.from_url(config.url, **options)
    if config.sentinel is not None:
        return _through_sentinels(config, options)
    return Redis.from_url(config.url, **options)


def require_tls_files(config: StateConfig) -> None:
    """Raise ``OSError`` or ``ValueError`` naming the file of ``state.tls`` that cannot be used."""
    tls = config.tls
    if tls is None:
        return
    for path in (tls.ca, tls.cert, tls.key):
        if path is not None:
            with open(path, "rb"):
                pass
    try:
        context = ssl.create_default_context(cafile=tls.ca)
        if tls.cert is not None:
            context.load_cert_chain(tls.cert, tls.key)
    except ssl.SSLError as error:
        raise ValueError(f"{tls.ca or tls.cert}: {error.reason or error}") from None


@asynccontextmanager
async def connection(config: StateConfig, *, wait_s: float = 0.0) -> AsyncIterator[Client]:
    """A client for one stretch of work. It is thrown away with its connections however that ends."""
    client = connect(config, wait_s=wait_s)
    try:
        yield client
    finally:
        with suppress(*FAULTS):
            async with asyncio.timeout(config.timeout_ms / 1_000.0):
                await client.aclose()


def _tls(config: StateConfig) -> dict[str, Any]:
    if config.tls is None:
        return {}
    tls = config.tls
    options: dict[str, Any] = {"ssl_ca_certs": tls.ca}
    if tls.cert is not None:
        options |= {"ssl_certfile": tls.cert, "ssl_keyfile": tls.key or tls.cert}
    if tls.insecure:
        options |= {"ssl_cert_reqs": "none", "ssl_check_hostname": False}
    return options


def _through_sentinels(config: StateConfig, options: dict[str, Any]) -> Client:
    """``config.url`` then tells scheme, credentials and database; the sentinels tell where."""
    assert config.sentinel is not None and config.url is not None
    parts = urlsplit(config.url)
    if parts.scheme == "rediss":
        options = options | {"ssl": True}
    if parts.username:
        options = options | {"username": parts.username}
    if parts.password:
        options = options | {"password": parts.password}
    if parts.path.strip("/"):
        options = options | {"db": int(parts.path.strip("/"))}
    asked: dict[str, Any] = {key: options[key] for key in ("socket_connect_timeout", "retry", "protocol")} | {
        "socket_timeout": options["socket_connect_timeout"]
    }
    if config.sentinel.username is not None:
        asked["username"] = config.sentinel.username
    if config.sentinel.password is not None:
        asked["password"] = config.sentinel.password.get_secret_value()
    hosts = [(host, int(port)) for host, _, port in (one.rpartition(":") for one in config.sentinel.hosts)]
    sentinel = Sentinel(hosts, sentinel_kwargs=asked, **options)  # type: ignore[no-untyped-call]
    return sentinel.master_for(config.sentinel.service)


def answered(error: BaseException) -> bool:
    """The store is there and said no; it may still be read."""
    return isinstance(error, ResponseError)


def described(error: BaseException) -> str:
    """What went wrong and what to do, in one line. Never has a secret in it."""
    for kinds, text in _TEXTS:
        if isinstance(error, kinds):
            return _HUNG_UP if text is _UNREACHED and _hung_up(error) else text
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"


def _hung_up(error: BaseException) -> bool:
    """There was a connection, and the other side closed it. Its reason, if it wrote one, was not read."""
    closed = isinstance(error.__cause__, (ConnectionResetError, BrokenPipeError))
    return closed or "closed by server" in str(error)


_UNREACHED = "it cannot be reached"
_HUNG_UP = (
    "it cannot be reached: it closes the connection; did it end, is it in protected mode, "
    "has it more clients than maxclients?"
)
_TEXTS: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    (
        (AuthenticationError, AuthorizationError),
        "it refuses the credentials; check state.username and state.password",
    ),
    (
        (NoPermissionError,),
        "its ACL forbids a command or key this router needs; see docs/operations.md, Several routers",
    ),
    ((OutOfMemoryError,), "its memory is full (maxmemory); give it more or set an eviction policy"),
    ((ReadOnlyError,), "it is a read-only replica; point state.url at the master, or use state.sentinel"),
    ((BusyLoadingError,), "it is still loading its data"),
    ((MasterDownError,), "its master is down"),
    ((ClusterDownError, RedisClusterException), "its cluster is down or cannot be reached"),
    ((TimeoutError, RedisTimeoutError), "no answer in time (state.timeout_ms)"),
    ((RedisConnectionError, OSError), _UNREACHED),
)
