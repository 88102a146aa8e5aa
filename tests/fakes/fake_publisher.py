"""A publisher of KV events on real ZMQ sockets, as engines have it: PUB and, if wanted, a replay ROUTER.

The PUB side is an XPUB, the same on the wire, so that a test can wait until the subscription has arrived
instead of sleeping. ``drop`` numbers a batch and keeps it for replay, but sends it to nobody.
"""

import asyncio
import struct
from collections.abc import Sequence

import zmq
import zmq.asyncio

from replica.contract.kv_events import CacheEvent, EventBatch
from replica.contract.kv_events_wire import Form, encode

LIMIT_S = 10.0


class FakePublisher:
    """Counts its batches from 0; ``restart`` begins anew."""

    def __init__(self, *, topic: bytes = b"kv", form: Form = "map", old_replay: bool = False) -> None:
        self.context = zmq.asyncio.Context()
        self.topic = topic
        self.form: Form = form
        self.old_replay = old_replay
        """Replays without the topic's frame, as vLLM had it until mid-2026."""
        self.seq = 0
        self.clock_s = 1_000.0
        self.kept: list[tuple[int, bytes]] = []
        self.replays_asked: list[int] = []
        self.endpoint = self.replay_endpoint = ""
        self._events = self.context.socket(zmq.XPUB)
        self._replay = self.context.socket(zmq.ROUTER)
        self._serving: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Events and replay on ports of the system's choice."""
        self._events.bind("tcp://127.0.0.1:*")
        self.endpoint = self._events.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def break_off(self) -> None:
        """The connection breaks; whoever subscribed tries to make it again."""
        self._events.close(linger=0)
        self._events = self.context.socket(zmq.XPUB)

    async def come_back(self) -> None:
        """Listen where it was, until a subscription has arrived again."""
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    self._events.bind(self.endpoint)
                    break
                except zmq.ZMQError as error:  # the old socket is closed in the background
                    if error.errno != zmq.EADDRINUSE:
                        raise
                    await asyncio.sleep(0)
        await self.subscribed()

    def listen_for_replay(self) -> None:
        """Serve the kept batches."""
        self._replay.bind("tcp://127.0.0.1:*")
        self.replay_endpoint = self._replay.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()
        self._serving = asyncio.create_task(self._serve_replays())

    def connect(self, endpoint: str) -> None:
        """As vLLM does with a concrete endpoint."""
        self._events.connect(endpoint)

    async def subscribed(self) -> None:
        """Wait until a subscription has arrived."""
        async with asyncio.timeout(LIMIT_S):
            message = await self._events.recv()
        assert message[:1] == b"\x01", message

    def stop(self) -> None:
        """Close everything."""
        if self._serving is not None:
            self._serving.cancel()
        self.context.destroy(linger=0)

    # --- batches --------------------------------------------------------------------------------

    def payload(self, events: Sequence[CacheEvent]) -> bytes:
        """A batch's payload, a tick later than the last one."""
        self.clock_s += 0.25
        return encode(EventBatch(self.clock_s, tuple(events)), form=self.form)

    async def publish(self, *events: CacheEvent) -> int:
        """Number, keep and send a batch; its number."""
        return await self.publish_payload(self.payload(events))

    async def publish_payload(self, payload: bytes) -> int:
        """The same for a payload made elsewhere."""
        seq = self.drop_payload(payload)
        await self.send(seq, payload)
        return seq

    def drop(self, *events: CacheEvent) -> int:
        """Number and keep a batch that gets lost on the way."""
        return self.drop_payload(self.payload(events))

    def drop_payload(self, payload: bytes) -> int:
        """The same for a payload made elsewhere."""
        seq = self.seq
        self.seq += 1
        self.kept.append((seq, payload))
        return seq

    async def send(self, seq: int, payload: bytes) -> None:
        """Send one message with any number."""
        await self.send_frames([self.topic, struct.pack(">Q", seq), payload])

    async def send_frames(self, frames: list[bytes]) -> None:
        """Send anything."""
        await self._events.send_multipart(frames)

    def restart(self) -> None:
        """An empty engine that counts from 0."""
        self.seq = 0
        self.kept.clear()

    async def _serve_replays(self) -> None:
        while True:
            client, empty, start = await self._replay.recv_multipart()
            (first,) = struct.unpack(">Q", start)
            self.replays_asked.append(first)
            topic = [] if self.old_replay else [self.topic]
            for seq, payload in self.kept:
                if seq >= first:
                    await self._replay.send_multipart(
                        [client, empty, *topic, struct.pack(">Q", seq), payload]
                    )
            end = [b""] if not self.old_replay else []
            await self._replay.send_multipart([client, empty, *end, b"\xff" * 8, b""])
