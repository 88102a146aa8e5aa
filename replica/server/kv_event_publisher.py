"""Publishes cache events over ZMQ as vLLM does: a PUB socket, and a ROUTER socket that replays.

A message is three frames: topic, number of the batch (8 bytes, big-endian, from 0), msgpack payload. One
batch is what one engine step told. PUB drops what nobody takes; the last batches are kept, and whoever sends
the number of a batch to the replay socket gets all from there on, then a mark of the end.

Lives on the event loop that made it.
"""

import asyncio
import logging
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import zmq
import zmq.asyncio

from replica.contract.kv_events import CacheEvent, EventBatch
from replica.contract.kv_events_wire import encode
from replica.kv_events_config import KvEventsConfig

log = logging.getLogger("warmroute.kv_events")

END_OF_REPLAY = b"\xff" * 8
YIELD_EVERY = 64
"""Batches replayed before other work gets its turn."""

_NUMBER = struct.Struct(">Q")


class KvEventPublisher:
    """Owns the sockets; ``close`` gives them back."""

    def __init__(self, config: KvEventsConfig) -> None:
        """Listens or connects at once. Raises ``OSError`` naming the endpoint that cannot be had."""
        self._config = config
        self._topic = config.topic.encode()
        self._next = 0
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=config.buffer_batches)
        self._context = zmq.asyncio.Context()
        self._serving: asyncio.Task[None] | None = None
        # A plain socket, without awaiting: PUB never waits.
        self._events: zmq.Socket[Any] = zmq.Context.shadow(self._context.underlying).socket(zmq.PUB)
        try:
            self._events.setsockopt(zmq.SNDHWM, config.hwm)
            self.endpoint = _open(self._events, config.endpoint, listens=config.binds)
            """Of the events, with the port that was really taken."""
            self.replay_endpoint: str | None = None
            if config.replay is not None:
                replay = self._context.socket(zmq.ROUTER)
                # ROUTER drops what its peer is too slow for: there must be room for all that is kept, twice.
                replay.setsockopt(zmq.SNDHWM, 2 * (config.buffer_batches + 1))
                self.replay_endpoint = _open(replay, config.replay, listens=True)
                self._serving = asyncio.create_task(self._serve_replays(replay), name="kv event replay")
        except OSError:
            self._close_sockets()
            raise

    def publish(self, timestamp_s: float, events: Sequence[CacheEvent]) -> None:
        """Number, send and keep what one step told; ``timestamp_s`` is seconds since 1970."""
        batch = EventBatch(timestamp_s, tuple(events), data_parallel_rank=0)
        payload = encode(batch, form=self._config.form, hashes=self._config.hashes)
        number = _NUMBER.pack(self._next)
        self._next += 1
        self._kept.append((number, payload))
        self._events.send_multipart([self._topic, number, payload])

    async def close(self) -> None:
        """Close the sockets; what no subscriber has taken yet is dropped."""
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        self._close_sockets()

    def _close_sockets(self) -> None:
        self._events.close(linger=0)
        self._context.destroy(linger=0)

    async def _serve_replays(self, socket: "zmq.asyncio.Socket") -> None:
        while True:
            # REQ puts an empty frame before its own; DEALER may leave it out.
            peer, *rest = await socket.recv_multipart()
            if not rest or len(rest[-1]) != _NUMBER.size:
                log.warning(
                    "a replay was asked for with %d frames, expected the number of a batch", len(rest)
                )
                continue
            (first,) = _NUMBER.unpack(rest[-1])
            sent = 0
            # What is published meanwhile comes over the other socket, too.
            for number, payload in list(self._kept):
                if _NUMBER.unpack(number)[0] < first:
                    continue
                await socket.send_multipart([peer, b"", self._topic, number, payload])
                sent += 1
                if sent % YIELD_EVERY == 0:
                    await asyncio.sleep(0)
            await socket.send_multipart([peer, b"", self._topic, END_OF_REPLAY, b""])


def _open(socket: "zmq.Socket[Any]", endpoint: str, *, listens: bool) -> str:
    """Bind or connect; where to, as ZMQ resolved it."""
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.IPV6, 1)
    try:
        if listens:
            socket.bind(endpoint)
        else:
            socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise OSError(
            error.errno, f"kv_events endpoint {endpoint}: {zmq.strerror(error.errno or 0)}"
        ) from None
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes)
    return address.rstrip(b"\0").decode()
