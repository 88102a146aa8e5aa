"""One replica's KV events over ZMQ: subscribe, repair gaps by replay, notice restarts, tell the fleet.

A message is three frames: topic, number of the batch (8 bytes, big-endian), msgpack payload. vLLM, SGLang and
our replica send the same. PUB drops what a subscriber cannot take, so numbers are checked
(``event_sequence``): what is missing is asked for at the replay endpoint, and where that fails the fleet is
told that some is lost. After each reconnect the publisher is asked for the last batch that was applied: one
that began anew meanwhile is known by it, however many it has sent since. Nothing that comes over the wire
ends the subscription.

Needs ``pyzmq`` (extra ``[events]``). One subscription is one publisher: of an engine with
data parallelism each rank publishes on a port of its own, and only one can be named here.
"""

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing

import zmq
import zmq.asyncio

from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared, EventBatch
from replica.contract.kv_events_wire import EventFormatError, decode
from router.proxy import kv_event_replay
from router.proxy.counters import KvEventCounters
from router.proxy.kv_event_replay import END_OF_REPLAY, MESSAGE_BYTES, NUMBER, QUEUED_MESSAGES
from router.replica_config import KvEventsConfig
from router.routing.event_sequence import EventSequence, Verdict
from router.routing.fleet import Fleet

log = logging.getLogger("warmroute.kv_events")

REPLAY_PAUSE_S = 30.0
"""After a failed replay no other is tried for so long; it would hold up the live events."""
YIELD_EVERY = 16
"""Batches applied before other work gets its turn."""


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
        self._recognised = False
        self._one_at_a_time = asyncio.Lock()
        self._socket = context.socket(zmq.SUB)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
        self._socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self._socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 30)
        self._socket.setsockopt(zmq.IPV6, 1)
        self._socket.subscribe(config.topic.encode())
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            if config.binds:
                self._socket.bind(config.endpoint)
            else:
                self._socket.connect(config.endpoint)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"kv_events endpoint {config.endpoint}: {error}") from None

    @property
    def endpoint(self) -> str:
        """Where it listens or connects to, with the port that was really taken."""
        address = self._socket.getsockopt(zmq.LAST_ENDPOINT)
        assert isinstance(address, bytes)
        return address.rstrip(b"\0").decode()

    def close(self) -> None:
        """Give the sockets back."""
        if not self._socket.closed:  # the whole context may have gone before
            self._socket.disable_monitor()
            self._socket.close()

    async def run(self) -> None:
        """Take messages for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._listen(), name=f"kv events {self._name}: messages")
            tasks.create_task(self._watch_connection(), name=f"kv events {self._name}: connection")

    async def _listen(self) -> None:
        while True:
            frames = await self._socket.recv_multipart()
            async with self._one_at_a_time:
                await self._look_at_connection()  # what it tells comes before what came over it
                try:
                    await self._take(frames)
                except Exception:
                    # Whatever a message holds, the next one may be good; what this one told is lost.
                    log.exception("replica %s: a KV event message could not be used", self._name)
                    self._counters.malformed += 1
                    self._fleet.events_missed(self._replica)
            await self._give_way()

    async def _watch_connection(self) -> None:
        """A publisher that came back may say nothing for long."""
        while True:
            await self._monitor.poll()
            async with self._one_at_a_time:
                await self._look_at_connection()

    async def _look_at_connection(self) -> None:
        connected = False
        while int(self._monitor.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            await self._monitor.recv_multipart()
            connected = True
        if connected and self._sequence.next:
            self._counters.reconnects += 1
            await self._recognise()

    # --- one message ----------------------------------------------------------------------------

    async def _take(self, frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[1]) != NUMBER.size or frames[1] == END_OF_REPLAY:
            self._counters.malformed += 1
            return
        (seq,) = NUMBER.unpack(frames[1])
        batch = self._decoded(frames[2])
        verdict = self._judge(seq, batch)
        if verdict is Verdict.GAP:
            self._counters.gaps += 1
            await self._replay(self._sequence.next)
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
            self._begin_anew()
            verdict = self._sequence.judge(seq, batch.timestamp_s)
        return verdict

    def _begin_anew(self) -> None:
        log.info("replica %s: KV events begin anew, its cache is taken to be empty", self._name)
        self._counters.restarts += 1
        self._fleet.cache_cleared(self._replica)
        self._sequence.restarted()

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
                "replica %s: %d batch(es) of KV events are lost; what they told is guessed", self._name, lost
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

    async def _recognise(self) -> None:
        """It is connected again: is it the one that told, and what did it tell meanwhile?

        Asked for the last batch that was applied, it has another one under that number, or none as high, if
        it began anew. Without an answer nothing is certain any more.
        """
        last = self._sequence.next - 1
        self._recognised = False
        answered = await self._replay(last)
        if self._recognised:
            return
        if answered and self._sequence.next == last + 1:
            self._begin_anew()
        if not self._sequence.next:
            await self._replay(0)
        else:
            log.info("replica %s: KV events go on after a break; some may be lost", self._name)
            self._fleet.events_missed(self._replica)

    async def _replay(self, start: int) -> bool:
        """Apply what the replica still tells from number ``start`` on; live messages wait in their queue.

        True if it answered.
        """
        endpoint = self._config.replay
        if endpoint is None or self._clock() < self._no_replay_before:
            return False
        try:
            async with aclosing(kv_event_replay.replay(self._context, endpoint, start)) as batches:
                async for frames in batches:
                    if self._take_replayed(frames):
                        break
                    await self._give_way()
        except (TimeoutError, zmq.ZMQError) as error:
            self._counters.replay_failures += 1
            self._no_replay_before = self._clock() + REPLAY_PAUSE_S
            log.warning("replica %s: replay from %s failed: %r", self._name, endpoint, error)
            return False
        return True

    def _take_replayed(self, frames: list[bytes]) -> bool:
        """One replayed batch; True if it shows that the replica began anew: what follows is to be asked anew.

        ``["", topic, number, payload]``; before mid-2026 without the topic.
        """
        if len(frames) < 2 or len(frames[-2]) != NUMBER.size:
            self._counters.malformed += 1
            return False
        (seq,) = NUMBER.unpack(frames[-2])
        if seq < self._sequence.next - 1:
            return False  # more than was asked for
        batch = self._decoded(frames[-1])
        if seq < self._sequence.next:
            restarted = batch is not None and self._judge(seq, batch) is not Verdict.DUPLICATE
            self._recognised = not restarted
            return restarted
        if seq > self._sequence.next:  # the replay buffer begins later
            self._give_up(seq)
        self._counters.replayed += batch is not None
        self._apply(seq, batch)
        return False
