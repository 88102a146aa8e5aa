"""Bearer keys: who may use a port. Compared in constant time, and never kept as they are."""

from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest

from router.config import KeysConfig
from router.proxy.router_error import KEY_MISSING, KEY_OF_OTHER_PORT, KEY_UNKNOWN, RouterError


class KeyRing:
    """The keys of one port. Without any, everybody may use it.

    >>> ring = KeyRing(["new", "old"], others=["admins"])
    >>> [ring.refusal(given) is None for given in (b"Bearer old", b"bearer new", b"Bearer n", b"new", None)]
    [True, True, False, False, False]
    >>> ring.refusal(b"Bearer admins").status, ring.refusal(b"Bearer n").status, ring.refusal(None).code
    (403, 401, 'missing_api_key')
    """

    __slots__ = ("_keys", "_others")

    def __init__(self, keys: Iterable[str], others: Iterable[str] = ()) -> None:
        """``others``: the keys of the other port, which are told so."""
        self._keys = [_digest(key.encode()) for key in keys]
        self._others = [_digest(key.encode()) for key in others]

    def __bool__(self) -> bool:
        return bool(self._keys)

    def refusal(self, authorization: bytes | None) -> RouterError | None:
        """What a request with this ``Authorization`` is told; None: it may pass."""
        if not self._keys:
            return None
        token = bearer_token(authorization)
        if token is None:
            return KEY_MISSING
        given = _digest(token)
        if _among(given, self._keys):
            return None
        return KEY_OF_OTHER_PORT if _among(given, self._others) else KEY_UNKNOWN


def bearer_token(authorization: bytes | None) -> bytes | None:
    """The key in an ``Authorization`` header, if there is one."""
    if authorization is None:
        return None
    scheme, _, token = authorization.partition(b" ")
    return token.strip() if scheme.lower() == b"bearer" else None


def public_keys(config: KeysConfig) -> KeyRing:
    """Those of the public port."""
    return KeyRing(_values(config, "public"), _values(config, "admin"))


def admin_keys(config: KeysConfig) -> KeyRing:
    """Those of the admin port."""
    return KeyRing(_values(config, "admin"), _values(config, "public"))


def _values(config: KeysConfig, port: str) -> list[str]:
    return [key.get_secret_value() for key in getattr(config, port)]


def _digest(key: bytes) -> bytes:
    """Of one length, whatever the key's: a comparison tells nothing of it."""
    return sha256(key).digest()


def _among(given: bytes, keys: list[bytes]) -> bool:
    """All are compared: how long it takes does not tell which one it was."""
    found = False
    for key in keys:
        found |= compare_digest(given, key)
    return found
