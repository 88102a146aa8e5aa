"""A tenant's cache salt: what keeps its cached prefixes apart from those of others, and who made it.

The router derives it from the tenant with a secret, so nobody can guess another's; it goes to engines as the
body field ``cache_salt``. Signed with a key that router and replicas share, it tells a replica that a router
made it: a client that reaches the replica itself cannot make one.

>>> ours = derived_salt(b"secret", "acme")
>>> ours, ours == derived_salt(b"other secret", "acme")
('993713ab1df883a4aaad8e440c215cdf', False)
>>> by_router = signed_salt(ours, b"key")
>>> is_signed(by_router, b"key"), is_signed(by_router, b"another"), is_signed(ours, b"key")
(True, False, False)
"""

from hmac import compare_digest, digest

SALT_BYTES = 16
SIGNATURE_BYTES = 16
LEAST_SECRET_CHARACTERS = 16
"""Of the secret and the key: shorter ones can be found by trying."""


def derived_salt(secret: bytes, namespace: str, own: str | None = None) -> str:
    """32 hexadecimal digits, other ones for any other namespace or ``own``.

    ``namespace`` is the tenant, or the group of tenants that share; ``own`` is what the client itself asked
    to be kept apart by, within the tenant. Parts are tagged and framed by their length.

    >>> derived_salt(b"s", "org_1", "2345") == derived_salt(b"s", "org_12345", "")
    False
    """
    framed = b"warmroute/1 cache salt" + b"".join(
        b" %c%d:%b" % (tag, len(value), value)
        for tag, part in ((b"n", namespace), (b"o", own))
        if part is not None
        for value in (part.encode("utf-8", "surrogatepass"),)
    )
    return digest(secret, framed, "sha256")[:SALT_BYTES].hex()


def signed_salt(salt: str, key: bytes) -> str:
    """``salt``, a dot, and 32 hexadecimal digits that only who has ``key`` can make."""
    return f"{salt}.{_signature(salt, key)}"


def is_signed(salt: str, key: bytes) -> bool:
    """Whether ``signed_salt`` made it with ``key``. Takes as long whether it nearly is or not."""
    unsigned, dot, signature = salt.rpartition(".")
    expected = _signature(unsigned, key)
    return bool(dot) and compare_digest(signature.encode("utf-8", "surrogatepass"), expected.encode())


def _signature(salt: str, key: bytes) -> str:
    framed = b"warmroute/1 salt signature " + salt.encode("utf-8", "surrogatepass")
    return digest(key, framed, "sha256")[:SIGNATURE_BYTES].hex()
