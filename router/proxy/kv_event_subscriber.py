"""One replica's KV events over ZMQ: subscribe, repair gaps by replay, notice restarts, tell the fleet.

A message is three frames: topic, number of the batch (8 bytes, big-endian), msgpack payload. vLLM, SGLang and
our replica send the same. PUB drops what a subscriber cannot take, so numbers are checked
(``event_sequence``): what is missing is asked for at the replay endpoint, and where that fails everything
the replica told is forgotten and learned anew. Nothing that comes over the wire ends the subscription.

Needs ``pyzmq`` (extra ``[events]``). One subscription is one publisher: of an engine with
data parallelism each rank publishes on a port of its own, and only one can be named here.
"""

import asyncio
import logging
import struct
from collections.abc import Callable

import zmq
import zmq.asyncio

from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch
from replica.contract.kv_events_wire import EventFormatError, decode
from router.proxy.counters import KvEventCounters
from router.replica_config import KvEventsConfig
from router.routing.event_sequence import EventSequence, Verdict
from router.routing.fleet import Fleet

log = logging.getLogger("warmroute.kv_events")

QUEUED_MESSAGES = 20_000
MESSAGE_BYTES = 64 * 1024 * 1024
REPLAY_SILENCE_S = 2.0
"""A replay that brings nothing for so long has failed."""
REPLAY_LIMIT_S = 20.0
REPLAY_PAUSE_S = 30.0
"""After a failed replay no other is tried for so long; it would hold up the live events."""
YIELD_EVERY = 16
"""Batches applied before other work gets its turn."""
END_OF_REPLAY = b"\xff" * 8

_NUMBER = struct.Struct(">Q")


class KvEventSubscriber:
    """Owns the sockets to one replica's publisher; ``run`` until cancelled, then ``close``."""

    def __init__(
        self,
        fleet: Fleet,
        replica: int,
        config: KvEventsConfig,
        counters: KvEventCounters,
        context: "zmq.asyncio.Context",
        clock: Callable[[], float],
    ) -> None:
        """Connects or binds at once. Raises ``OSError`` when the endpoint cannot be bound."""
        self._fleet = fleet
        self._replica = replica
        self._name = fleet.replicas[replica].name
        self._config = config
        self._counters = counters
        self._context = context
        self._clock = clock
        self._sequence = EventSequence()
        self._no_replay_before = float("-inf")
        self._since_yield = 0
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.subscribe(config.topic.encode())
        try:
            if config.binds:
                self._socket.bind(config.endpoint)
            else:
                self._socket.connect(config.endpoint)
        except zmq.ZMQError as error:
            self._socket.close()
            raise OSError(error.errno, f"kv_events endpoint {config.endpoint}: {error}") from None

    @property
    def endpoint(self) -> str:
        """Where it listens or connects to, with the port that was really taken."""
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        return address.rstrip(b"\0").decode()

    def close(self) -> None:
        """Give the sockets back."""
        self._socket.close()

    async def run(self) -> None:
        """Take messages for ever."""
        while True:
            frames = await self._socket.recv_multipart()
            try:
                await self._take(frames)
            except Exception:
                # Whatever a message holds, the next one may be good; what this one told is lost.
                log.exception("replica %s: a KV event message could not be used", self._name)
                self._counters.malformed += 1
                self._fleet.events_missed(self._replica)
            await self._give_way()

    # --- one message ----------------------------------------------------------------------------

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != _NUMBER.size or frames[1] == END_OF_REPLAY:
            self._counters.malformed += 1
            return
        (seq,) = _NUMBER.unpack(frames[1])
        batch = self._decoded(frames[2])
        verdict = self._judge(seq, batch)
        if verdict is Verdict.GAP:
            self._counters.gaps += 1
            await self._repair(seq)
            verdict = self._judge(seq, batch)
            if verdict is Verdict.GAP:
                self._give_up(seq)
                verdict = Verdict.NEXT
            elif verdict is Verdict.DUPLICATE:
                return  # the replay brought it, too
        if verdict is Verdict.NEXT:
            self._apply(seq, batch)
        else:
            self._counters.duplicates += 1

    def _judge(self, seq: int, batch: EventBatch | None) -> Verdict:
        """What a live batch is; a restart is acted upon."""
        if batch is None:
            return Verdict.DUPLICATE if seq < self._sequence.next else self._sequence.judge(seq, 0.0)
        verdict = self._sequence.judge(seq, batch.timestamp_s)
        if verdict is Verdict.RESTART:
            log.info("replica %s: KV events begin anew, its cache is taken to be empty", self._name)
            self._counters.restarts += 1
            self._fleet.cache_cleared(self._replica)
            self._sequence.restarted()
            verdict = self._sequence.judge(seq, batch.timestamp_s)
        return verdict

    def _decoded(self, payload: bytes) -> EventBatch | None:
        try:
            return decode(payload)
        except EventFormatError as error:
            self._counters.malformed += 1
            log.warning("replica %s: malformed KV events: %s", self._name, error)
            return None

    def _apply(self, seq: int, batch: EventBatch | None) -> None:
        if batch is None:  # what it told is lost
            self._sequence.applied(seq, 0.0)
            self._counters.lost += 1
            self._fleet.events_missed(self._replica)
            return
        self._sequence.applied(seq, batch.timestamp_s)
        fleet, replica, counters = self._fleet, self._replica, self._counters
        counters.batches += 1
        for event in batch.events:
            match event:
                case BlocksStored():
                    counters.stored_events += 1
                    fleet.blocks_stored(replica, event)
                case BlocksRemoved():
                    counters.removed_events += 1
                    fleet.blocks_removed(replica, event)
                case CacheCleared():
                    counters.cleared_events += 1
                    fleet.cache_cleared(replica)

    def _give_up(self, seq: int) -> None:
        """Batches before ``seq`` cannot be had. At the very beginning nothing is wrong with knowing less."""
        lost = self._sequence.missing_before(seq)
        if self._sequence.next:
            log.warning(
                "replica %s: %d batch(es) of KV events are lost; its cache is learned anew", self._name, lost
            )
            self._fleet.events_missed(self._replica)
        self._counters.lost += lost
        self._sequence.skipped_to(seq)

    async def _give_way(self) -> None:
        """Messages that wait are taken without a pause: let others run now and then."""
        self._since_yield += 1
        if self._since_yield >= YIELD_EVERY:
            self._since_yield = 0
            await asyncio.sleep(0)

    # --- replay ---------------------------------------------------------------------------------

    async def _repair(self, live_seq: int) -> None:
        """Ask for what is missing before ``live_seq``; live messages wait in their queue meanwhile."""
        endpoint = self._config.replay
        if endpoint is None or self._clock() < self._no_replay_before:
            return
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, 1)
        try:
            socket.connect(endpoint)
            async with asyncio.timeout(REPLAY_LIMIT_S):
                await socket.send_multipart([b"", _NUMBER.pack(self._sequence.next)])
                while True:
                    async with asyncio.timeout(REPLAY_SILENCE_S):
                        frames = await socket.recv_multipart()
                    if self._take_replayed(frames):
                        return
                    await self._give_way()
        except (TimeoutError, zmq.ZMQError) as error:
            self._counters.replay_failures += 1
            self._no_replay_before = self._clock() + REPLAY_PAUSE_S
            log.warning("replica %s: replay from %s failed: %r", self._name, endpoint, error)
        finally:
            socket.close()

    def _take_replayed(self, frames: list[bytes]) -> bool:
        """One replayed batch; True if it is the mark of the end.

        ``["", topic, number, payload]``; before mid-2026 without the topic.
        """
        if len(frames) < 2 or len(frames[-2]) != _NUMBER.size:
            self._counters.malformed += 1
            return False
        if frames[-2] == END_OF_REPLAY:
            return True
        (seq,) = _NUMBER.unpack(frames[-2])
        if seq < self._sequence.next:
            return False  # more than was asked for
        if seq > self._sequence.next:  # the replay buffer begins later
            self._give_up(seq)
        batch = self._decoded(frames[-1])
        self._counters.replayed += batch is not None
        self._apply(seq, batch)
        return False
