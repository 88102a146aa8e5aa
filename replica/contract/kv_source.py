"""The header that names where a request's KV can be had: ``x-warmroute-kv-source``.

``HOST:PORT; tokens=N; sig=HEX``: the replica that listens for its peers at HOST:PORT holds the first N tokens
of the prompt. ``tokens`` may be missing (all that there is); ``sig`` proves that a router with the key wrote
it.

>>> value = kv_source_value("10.0.0.7:8400", 2_896, b"key")
>>> source = read_kv_source(value)
>>> source.address, source.tokens, source.signed_by(b"key"), source.signed_by(b"another")
('10.0.0.7:8400', 2896, True, False)
>>> read_kv_source("10.0.0.7"), read_kv_source("10.0.0.7:8400; tokens=many")
(None, None)
"""

import hmac
from dataclasses import dataclass

KV_SOURCE_HEADER = "x-warmroute-kv-source"
LONGEST_VALUE = 512


@dataclass(frozen=True, slots=True)
class KvSource:
    """What the header says."""

    address: str
    """HOST:PORT."""
    tokens: int | None
    signature: str

    def signed_by(self, key: bytes) -> bool:
        """A holder of ``key`` wrote it. Takes the same time whatever is wrong."""
        return hmac.compare_digest(self.signature, _signature(self.address, self.tokens, key))


def kv_source_value(address: str, tokens: int | None, key: bytes | None = None) -> str:
    """The header's value."""
    value = address if tokens is None else f"{address}; tokens={tokens}"
    return value if key is None else f"{value}; sig={_signature(address, tokens, key)}"


def read_kv_source(value: str) -> KvSource | None:
    """What ``value`` says; None when it is malformed."""
    if len(value) > LONGEST_VALUE or not value.isascii():
        return None
    address, *rest = [part.strip() for part in value.split(";")]
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) <= 65_535:
        return None
    tokens: int | None = None
    signature = ""
    for part in rest:
        name, _, given = part.partition("=")
        if name == "tokens" and given.isdigit() and len(given) <= 12:
            tokens = int(given)
        elif name == "sig":
            signature = given
        else:
            return None
    return KvSource(address, tokens, signature)


def _signature(address: str, tokens: int | None, key: bytes) -> str:
    said = f"warmroute kv source {address} {'' if tokens is None else tokens}"
    return hmac.digest(key, said.encode(), "sha256").hex()
