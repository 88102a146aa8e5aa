"""How routers write to one another: batches of events, and what a router knows, as msgpack.

The first byte is the version of the form, and of how text is hashed into the keys that prompts are told by.
A router that meets another version counts it and goes on alone.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from router.routing.learned import Learned
from router.routing.peer_events import PeerEvent

VERSION = b"\x03"
EVERYBODY = "*"


class WireError(ValueError):
    """Bytes that are no message of this version."""


class Batch(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one router tells all others at once."""

    router: str
    number: int
    """Counts this router's batches from 1: a number left out is a batch lost."""
    events: Sequence[PeerEvent] = ()
    outstanding: Sequence[int] | None = None
    """In a statement, the numbers of all requests that the router has outstanding: any other is over. Those
    that are not known follow, in this batch and the next."""
    ask: Sequence[str] = ()
    """Routers whose statement is wanted; ``EVERYBODY``: all."""
    warm_from: str = ""
    """The router that is asked to write down what it knows, for this one."""
    leaving: bool = False
    """The router's last."""
    lacks: Mapping[str, tuple[int, int]] = {}
    """Of routers in ``ask``, the first and the last of those batches that did not arrive: their prompts are
    wanted, too."""
    again: tuple[int, int] | None = None
    """In a statement: the prompts of those own batches follow, as far as they are remembered."""


class ReplicaLearned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=101):
    """What was learned of one replica's speed."""

    replica: str
    learned: Learned


class FleetLearned(msgspec.Struct, frozen=True, array_like=True, gc=False, tag=102):
    """What was learned of all replicas, and of the traffic."""

    learned: Learned
    prompt_tokens: float
    prompt_units: float
    output_tokens: float
    allowed_ttft_s: float
    routers: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 1
    """The most that were there at once."""


Knowledge = PeerEvent | ReplicaLearned | FleetLearned
"""One piece of what a router knows (``knowledge.py``)."""

_encoder = msgspec.msgpack.Encoder()
_batches = msgspec.msgpack.Decoder(Batch)
_chunks = msgspec.msgpack.Decoder(list[Knowledge])


def encode_batch(batch: Batch) -> bytes:
    """The bytes of ``batch``."""
    return VERSION + _encoder.encode(batch)


def decode_batch(data: bytes) -> Batch:
    """What ``encode_batch`` encoded. Raises ``WireError``."""
    try:
        return _batches.decode(_body(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a batch: {error}") from None


def encode_chunk(pieces: Sequence[Knowledge]) -> bytes:
    """The bytes of some pieces."""
    return VERSION + _encoder.encode(pieces)


def decode_chunk(data: bytes) -> list[Knowledge]:
    """What ``encode_chunk`` encoded. Raises ``WireError``."""
    try:
        return _chunks.decode(_body(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"not a chunk of knowledge: {error}") from None


def _body(data: bytes) -> memoryview:
    if data[:1] != VERSION:
        raise WireError(f"version {data[:1].hex() or 'missing'}, expected {VERSION.hex()}")
    return memoryview(data)[1:]
