"""Request bodies that come compressed: what a Content-Encoding says, within the size a body may have."""

import zlib

from replica.server.client_error import ClientError

SUPPORTED = ("identity", "gzip", "deflate")
_GZIP, _ZLIB, _RAW = 31, 15, -15
"""zlib's names (wbits) for its three containers; deflate comes in the last two."""


def decoded(raw: bytes, encoding: str | None, most_bytes: int) -> bytes:
    """The body in ``raw``; at most ``most_bytes`` of it.

    Raises:
        ClientError: an encoding that is not supported (415), a body that is not so encoded (400) or is too
            large once it is decoded (413).

    >>> decoded(zlib.compress(b"{}"), "deflate", 10)
    b'{}'
    >>> decoded(b"junk", "gzip", 10)
    Traceback (most recent call last):
    replica.server.client_error.ClientError: the request body cannot be decoded as gzip, its Content-Encoding
    """
    name = (encoding or "identity").strip().lower()
    if name not in SUPPORTED:
        raise ClientError(
            f"Content-Encoding {name!r} is not supported; send {', '.join(SUPPORTED)} or no such header",
            status=415,
        )
    if name == "identity":
        return raw
    for container in (_GZIP,) if name == "gzip" else (_ZLIB, _RAW):
        reader = zlib.decompressobj(container)
        try:
            body = reader.decompress(raw, most_bytes + 1)
        except zlib.error:
            continue
        if len(body) > most_bytes:
            raise ClientError(
                f"the request body is larger than {most_bytes // 2**20} MiB once it is decoded, the most "
                "this replica reads (max_body_mib)",
                status=413,
            )
        if reader.eof:
            return body
    raise ClientError(f"the request body cannot be decoded as {name}, its Content-Encoding")
