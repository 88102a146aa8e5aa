"""Requests as bytes, with a length or in chunks."""

import json

BODY = json.dumps(
    {"model": "m", "messages": [{"role": "user", "content": "h\u00e9 \u6f22 \U0001f389"}]}, ensure_ascii=False
).encode()


def raw_post(body: bytes = BODY, *lines: bytes, path: bytes = b"/v1/chat/completions") -> bytes:
    head = [b"POST " + path + b" HTTP/1.1", b"Host: h", b"Content-Length: %d" % len(body), *lines]
    return b"\r\n".join(head) + b"\r\n\r\n" + body


def raw_chunked(
    body: bytes, size: int, extension: bytes = b"", trailers: bytes = b"", line: bytes = b"X: y"
) -> bytes:
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    chunks = b"".join(b"%x%b\r\n%b\r\n" % (len(piece), extension, piece) for piece in pieces)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\n"
        + line
        + b"\r\nTransfer-Encoding: chunked\r\n\r\n"
        + chunks
        + b"0\r\n"
        + trailers
        + b"\r\n"
    )
