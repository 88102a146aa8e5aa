"""What one client sent, cut anywhere, to whole requests: heads that are known again, long bodies."""

import pytest

from router.proxy.request_head import ClientError
from router.proxy.request_reader import LONG_PIECE_BYTES, LastHead, RequestReader

LIMITS = {"header_limit": 1024, "body_limit": 1 << 20}


def request(body: bytes, key: str = "a", path: str = "/v1/x") -> bytes:
    lines = f"POST {path} HTTP/1.1", "Host: h", f"Authorization: Bearer {key}", f"Content-Length: {len(body)}"
    return "\r\n".join((*lines, "", "")).encode() + body


def read(reader: RequestReader, data: bytes) -> tuple[bytes, bytes | None, bytes]:
    reader.feed(data)
    found = reader.next_request(**LIMITS)
    assert found is not None
    head, body = found
    return head.target, head.found.get(b"authorization"), body


def test_a_head_is_known_again_on_another_connection_only_if_it_is_the_same() -> None:
    last = LastHead()
    first = RequestReader(last)
    read(first, request(b"{}"))
    known = last.known
    assert known is not None
    same, other = RequestReader(last), RequestReader(last)
    assert read(same, request(b"longer")) == (b"/v1/x", b"Bearer a", b"longer") and last.known is known
    assert read(other, request(b"{}", key="b")) == (b"/v1/x", b"Bearer b", b"{}") and last.known is not known
    assert read(first, request(b"z", path="/v1/y")) == (b"/v1/y", b"Bearer a", b"z")


def test_a_head_that_is_known_still_has_a_limit() -> None:
    last = LastHead()
    read(RequestReader(last), request(b"{}"))
    reader = RequestReader(last)
    reader.feed(request(b"{}"))
    with pytest.raises(ClientError, match="head"):
        reader.next_request(header_limit=20, body_limit=100)


@pytest.mark.parametrize("cut", [1, LONG_PIECE_BYTES - 1, LONG_PIECE_BYTES, LONG_PIECE_BYTES + 1])
def test_a_long_body_in_pieces_is_whole_and_counted(cut: int) -> None:
    body = bytes(range(256)) * 256
    whole = request(body)
    at = len(whole) - len(body) + cut
    reader = RequestReader()
    for _ in range(2):  # the second time its head is known
        reader.feed(whole[:at])
        assert reader.next_request(**LIMITS) is None and reader.receiving == cut
        reader.feed(whole[at : at + 5])
        assert reader.next_request(**LIMITS) is None and reader.receiving == cut + 5
        assert read(reader, whole[at + 5 :] + b"GET")[2] == body
        assert reader.receiving == 0 and reader.buffer == b"GET"
        reader.buffer = b""
