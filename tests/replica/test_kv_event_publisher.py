"""KV events on real sockets, from the publisher alone and from a replica that serves."""

import asyncio
import re
import struct
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from replica.contract.block_hash import chain, hash_number, root_hash
from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared
from replica.contract.kv_events_wire import decode
from replica.kv_events_config import KvEventsConfig
from replica.server.app import ListenError
from replica.server.kv_event_publisher import END_OF_REPLAY, KvEventPublisher
from tests.contract.vllm_readers import ArrayBatch, MapBatch
from tests.replica.serving import post, replica

LIMIT_S = 10.0
STORED = BlocksStored((bytes(range(32)),), None, (1, 2), 2)


def _number(frame: bytes) -> int:
    (number,) = struct.unpack(">Q", frame)
    return int(number)


class Listener:
    """A subscriber and a replay client, as vLLM's examples have them."""

    def __init__(self, publisher: KvEventPublisher, topic: bytes = b"") -> None:
        self.context = zmq.asyncio.Context()
        self.events = self.context.socket(zmq.SUB)
        self.events.subscribe(topic)
        self.events.connect(publisher.endpoint.replace("0.0.0.0", "127.0.0.1"))
        self.replay_endpoint = publisher.replay_endpoint
        self.room = 1_000
        """Messages that a replay's reader lets wait."""

    async def next(self) -> list[bytes]:
        """The next message's frames."""
        async with asyncio.timeout(LIMIT_S):
            return await self.events.recv_multipart()

    async def joined(self, publisher: KvEventPublisher) -> int:
        """Publish until one comes through, and take all that did; the number of the next batch."""
        sent = 0
        async with asyncio.timeout(LIMIT_S):
            while not await self.events.poll(10):
                publisher.publish(0.0, [STORED])
                sent += 1
            while _number((await self.next())[1]) != sent - 1:
                pass
        return sent

    async def replay(self, first: int, *, plain: bool = False) -> list[list[bytes]]:
        """Every message from ``first`` on, up to the mark of the end, as a REQ (or DEALER) gets it."""
        assert self.replay_endpoint is not None
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVHWM, self.room)
        socket.connect(self.replay_endpoint)
        await socket.send_multipart([struct.pack(">Q", first)] if plain else [b"", struct.pack(">Q", first)])
        messages = []
        async with asyncio.timeout(LIMIT_S):
            while (frames := await socket.recv_multipart())[2] != END_OF_REPLAY:
                messages.append(frames)
        assert frames[3] == b""
        return messages

    def close(self) -> None:
        """Give the sockets back."""
        self.context.destroy(linger=0)


def play(scenario: Callable[[KvEventPublisher, Listener], Awaitable[None]], **config: Any) -> None:
    """Run ``scenario`` with a publisher on free ports and a listener."""

    async def run() -> None:
        keys = {"endpoint": "tcp://127.0.0.1:*", "bind": True, "replay": "tcp://127.0.0.1:*"} | config
        publisher = KvEventPublisher(KvEventsConfig(**keys))
        listener = Listener(publisher, keys.get("topic", "").encode())
        try:
            await scenario(publisher, listener)
        finally:
            listener.close()
            await publisher.close()

    asyncio.run(run())


@pytest.mark.parametrize(("form", "reader"), [("map", MapBatch), ("array", ArrayBatch)])
def test_vllm_s_subscriber_reads_each_batch_with_its_number_and_topic(form: str, reader: type[Any]) -> None:
    async def scenario(publisher: KvEventPublisher, listener: Listener) -> None:
        first = await listener.joined(publisher)
        publisher.publish(12.5, [STORED, BlocksRemoved(STORED.block_hashes)])
        publisher.publish(13.5, [CacheCleared()])
        for number, count in ((first, 2), (first + 1, 1)):
            topic, frame, payload = await listener.next()
            batch = msgspec.msgpack.decode(payload, type=reader)
            assert (topic, _number(frame), len(batch.events)) == (b"kv@a", number, count)
            assert batch.data_parallel_rank == 0
            if count == 2:
                assert batch.ts == 12.5
                assert batch.events[0].block_hashes == [hash_number(bytes(range(32)))]

    play(scenario, form=form, topic="kv@a")


def test_hashes_may_go_whole() -> None:
    async def scenario(publisher: KvEventPublisher, listener: Listener) -> None:
        await listener.joined(publisher)
        publisher.publish(1.0, [STORED])
        assert decode((await listener.next())[2]).events == (STORED,)

    play(scenario, hashes="bytes")


@pytest.mark.parametrize("plain", [False, True], ids=["as REQ sends it", "without the empty frame"])
def test_what_nobody_heard_is_replayed_from_any_number(plain: bool) -> None:
    async def scenario(publisher: KvEventPublisher, listener: Listener) -> None:
        for number in range(300):
            publisher.publish(float(number), [STORED])
        for first in (0, 290, 299, 300, 5_000):
            messages = await listener.replay(first, plain=plain)
            assert [_number(frames[2]) for frames in messages] == list(range(first, 300))
            assert [decode(frames[3]).timestamp_s for frames in messages] == list(range(first, 300))
            assert all(frames[:2] == [b"", b"t"] for frames in messages)

    play(scenario, topic="t")


def test_a_slow_reader_of_a_replay_gets_all_of_it() -> None:
    async def scenario(publisher: KvEventPublisher, listener: Listener) -> None:
        for number in range(3_000):
            publisher.publish(float(number), [STORED] * 20)
        listener.room = 1
        assert [_number(frames[2]) for frames in await listener.replay(0)] == list(range(3_000))

    play(scenario, buffer_batches=3_000)


def test_only_the_last_batches_are_kept() -> None:
    async def scenario(publisher: KvEventPublisher, listener: Listener) -> None:
        for number in range(30):
            publisher.publish(float(number), [STORED])
        assert [_number(frames[2]) for frames in await listener.replay(3)] == list(range(20, 30))

    play(scenario, buffer_batches=10)


def test_a_question_that_is_none_is_not_answered_and_does_no_harm() -> None:
    async def scenario(publisher: KvEventPublisher, listener: Listener) -> None:
        publisher.publish(1.0, [STORED])
        socket = listener.context.socket(zmq.DEALER)
        socket.connect(publisher.replay_endpoint or "")
        for frames in ([b"x"], [b"", b""], [b"", b"123456789"]):
            await socket.send_multipart(frames)
        assert len(await listener.replay(0)) == 1
        assert not await socket.poll(0)

    play(scenario)


def test_a_port_that_is_taken_is_named_and_ends_the_start() -> None:
    async def run() -> None:
        async with replica(kv_events={"endpoint": "tcp://127.0.0.1:*", "bind": True}) as running:
            assert running.events is not None
            taken = {"endpoint": running.events.endpoint, "bind": True}
            with pytest.raises(ListenError, match=re.escape(f"kv_events endpoint {running.events.endpoint}")):
                async with replica(kv_events=taken):
                    pass

    asyncio.run(run())


@pytest.mark.parametrize(("form", "reader"), [("map", MapBatch), ("array", ArrayBatch)])
def test_a_replica_tells_of_a_block_when_it_is_computed_and_of_a_reset(form: str, reader: type[Any]) -> None:
    """Three requests and a reset: a batch per step that published, salts, the contract's hashes."""

    async def run() -> None:
        events: dict[str, Any] = {"endpoint": "tcp://127.0.0.1:*", "bind": True, "form": form}
        events["replay"] = "tcp://127.0.0.1:*"
        salts = {"accept": "any"}
        async with replica(
            kv_events=events, cache_salt=salts, max_batched_tokens=32, max_running=4
        ) as running:
            assert running.events is not None
            listener = Listener(running.events)
            try:
                prompt = list(range(100, 170))
                body = {"prompt": prompt, "max_tokens": 1, "temperature": 0}
                for salt in (None, "a"):
                    salted = {**body, "cache_salt": salt} if salt else body
                    assert (await post(running.url + "/v1/completions", salted))[0] == 200
                assert (await post(running.url + "/v1/completions", body))[0] == 200  # all of it is cached
                assert (await post(running.url + "/reset_prefix_cache", {}))[1] == {"success": True}
                async with asyncio.timeout(LIMIT_S):
                    while len(messages := await listener.replay(0)) < 5:
                        pass  # they are published behind the answers
            finally:
                listener.close()
        batches = [decode(frames[3]) for frames in messages]
        kinds = [type(msgspec.msgpack.decode(frames[3], type=reader).events[0]) for frames in messages]
        assert [kind.__struct_config__.tag for kind in kinds] == ["BlockStored"] * 4 + ["AllBlocksCleared"]
        told = [event for batch in batches for event in batch.events]
        assert all(len(batch.events) == 1 for batch in batches)
        assert isinstance(told[-1], CacheCleared)
        stored = [event for event in told[:-1] if isinstance(event, BlocksStored)]
        assert [len(event.block_hashes) for event in stored] == [2, 2, 2, 2], "32 tokens a step; 4 blocks"
        names = [name for event in stored for name in event.block_hashes]
        for salt, found in ((None, names[:4]), ("a", names[4:])):
            expected = chain(prompt, 16, root_hash(salt))
            assert found == [hash_number(digest) for digest in expected]
        assert [event.salt for event in stored] == [None, None, "a", None]
        assert stored[1].parent_hash == names[1] and stored[1].token_ids == tuple(prompt[32:64])
        assert [batch.timestamp_s for batch in batches] == sorted(batch.timestamp_s for batch in batches)

    asyncio.run(run())
