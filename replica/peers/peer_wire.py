"""What two replicas say to each other when one pulls KV from the other.

::

    server   greeting   magic (8) | nonce (16)
    client   question   magic (8) | bytes of head (4), of tokens (4) | head, JSON | tokens, int32 | MAC (32)
    server   status     one byte
             block      "B" | number (4) | bytes (4) | MAC (32) | the block's KV     as many as it has
             end        "E"

All numbers are little-endian. The version is in the magic: an older or newer peer is not understood, and what
it has is computed. The question holds the tokens themselves, with salt, adapter and images: the server finds
its blocks as it does for a request of its own, comparing tokens, and both compute the chained hash of every
block. A block's MAC is over fingerprint, that hash and the bytes, under the fleet's secret: KV of another
model, another prefix, another tenant or a stranger is not taken for the one asked for. The question's MAC
holds the server's nonce, so nobody without the secret gets KV, or learns what is cached.
"""

import hmac
import json
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256

from replica.contract.multimodal import MultimodalItem, check_items

MAGIC = b"wrpeer02"
NONCE_BYTES = 16
MAC_BYTES = 32
GREETING_BYTES = len(MAGIC) + NONCE_BYTES
QUESTION = struct.Struct("<8sII")
BLOCK = struct.Struct("<II32s")
"""After its letter."""
BLOCK_LETTER, END_LETTER = b"B", b"E"
MOST_HEAD_BYTES = 1 << 20

OK, BUSY, OTHER_MODEL, REFUSED = b"O", b"Y", b"F", b"R"


class PeerError(Exception):
    """The other side does not speak as it should."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked for: blocks of one prompt."""

    fingerprint: str
    salt: str | None
    adapter: str | None
    block_bytes: int
    ranges: tuple[tuple[int, int], ...]
    """Half-open ranges of block numbers, ascending."""
    tokens: bytes
    """Of the prompt up to the last block, int32."""
    multimodal: tuple[MultimodalItem, ...] = ()
    """Images that begin in it."""

    @property
    def places(self) -> list[int]:
        """The block numbers, in order."""
        return [number for start, stop in self.ranges for number in range(start, stop)]


def key_of(secret: str) -> bytes:
    """The key of all MACs."""
    return sha256(b"warmroute peers " + secret.encode()).digest()


def ranges_of(places: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Ascending block numbers as ranges.

    >>> ranges_of([3, 4, 5, 9])
    ((3, 6), (9, 10))
    """
    found: list[tuple[int, int]] = []
    for place in places:
        if found and found[-1][1] == place:
            found[-1] = (found[-1][0], place + 1)
        else:
            found.append((place, place + 1))
    return tuple(found)


def written_question(question: Question, nonce: bytes, key: bytes) -> bytes:
    """The question on the wire."""
    head = json.dumps(
        {
            "fingerprint": question.fingerprint,
            "salt": question.salt,
            "adapter": question.adapter,
            "block_bytes": question.block_bytes,
            "ranges": question.ranges,
            "multimodal": [(item.identifier, item.offset, item.tokens) for item in question.multimodal],
        }
    ).encode()
    said = QUESTION.pack(MAGIC, len(head), len(question.tokens)) + head + question.tokens
    return said + hmac.digest(key, nonce + said, "sha256")


def question_sizes(opening: bytes) -> tuple[int, int]:
    """Bytes of head and of tokens. Raises PeerError for another version or senseless sizes."""
    magic, head_bytes, token_bytes = QUESTION.unpack(opening)
    if magic != MAGIC:
        raise PeerError(f"expected {MAGIC!r}, got {magic!r}")
    if head_bytes > MOST_HEAD_BYTES or token_bytes % 4:
        raise PeerError(f"a head of {head_bytes} bytes, tokens of {token_bytes}")
    return head_bytes, token_bytes


def read_question(said: bytes, head_bytes: int, mac: bytes, nonce: bytes, key: bytes) -> Question:
    """The question in ``said``, all but its MAC. Raises PeerError when the secret is another."""
    if not hmac.compare_digest(mac, hmac.digest(key, nonce + said, "sha256")):
        raise PeerError("the secret is another")
    start = QUESTION.size
    try:
        head = json.loads(said[start : start + head_bytes])
        ranges = tuple((int(first), int(stop)) for first, stop in head["ranges"])
        question = Question(
            str(head["fingerprint"]),
            _text_or_none(head["salt"]),
            _text_or_none(head["adapter"]),
            int(head["block_bytes"]),
            ranges,
            said[start + head_bytes :],
            tuple(MultimodalItem(str(name), int(at), int(size)) for name, at, size in head["multimodal"]),
        )
        check_items(question.multimodal, sys.maxsize)
    except (KeyError, TypeError, ValueError) as error:
        raise PeerError(f"a head that cannot be read: {error}") from error
    ends = [0, *(end for pair in ranges for end in pair)]
    if ends != sorted(ends) or ends[-1] > len(question.tokens) // 4:
        raise PeerError(f"blocks {ranges} are not ascending, or more than there are tokens")
    if question.block_bytes < 1:
        raise PeerError(f"blocks of {question.block_bytes} bytes")
    return question


def _text_or_none(value: object) -> str | None:
    """Raises ValueError for what is neither, or no UTF-8."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {value!r}")
    value.encode()
    return value


def block_mac(key: bytes, fingerprint: str, block_hash: bytes, content: memoryview | bytearray) -> bytes:
    """Over what a block is and what it holds."""
    mac = hmac.new(key, fingerprint.encode() + block_hash, "sha256")
    mac.update(content)
    return mac.digest()


def block_head(number: int, size_bytes: int, mac: bytes) -> bytes:
    """What comes before a block's bytes."""
    return BLOCK_LETTER + BLOCK.pack(number, size_bytes, mac)
