"""Clients that mean harm: what one of them sends holds neither the event loop nor the memory.

How long the loop is held shows as work that cannot end: what each of these cost before was quadratic.
"""

import asyncio
import gc
import tracemalloc
from typing import Any, cast

from router.proxy.assembly import settle_garbage
from router.proxy.client_connection import MOST_AT_ONCE, ClientConnection
from router.proxy.request_reader import MOST_CHUNKED_BYTES, RequestReader
from tests.fakes.fake_replica import chunk
from tests.fakes.proxy_rig import Rig, until, with_rig

POST = b"POST /v1/x HTTP/1.1\r\nHost: h\r\n"
HEALTH = b"GET /health HTTP/1.1\r\nHost: h\r\n\r\n"
LIMITS = {"header_limit": 1 << 20, "body_limit": 1 << 30}


def test_millions_of_blank_lines_are_skipped_in_one_go() -> None:
    reader = RequestReader()
    reader.feed(b"\r\n" * 3_000_000 + b"\r")
    assert reader.next_request(**LIMITS) is None and reader.buffer == b"\r"
    reader.feed(b"\n" + HEALTH)
    request = reader.next_request(**LIMITS)
    assert request is not None and request[0].target == b"/health"


def _traced_bytes(reader: RequestReader, data: bytes) -> int:
    """Memory that ``reader`` holds once it has read ``data``, its buffer apart."""
    reader.feed(data)
    tracemalloc.start()
    try:
        while reader.buffer:
            reader.next_request(**LIMITS)
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_a_body_of_tiny_chunks_takes_its_bytes_and_no_more() -> None:
    reader = RequestReader()
    reader.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n")
    reader.next_request(**LIMITS)
    assert _traced_bytes(reader, chunk(b"xx") * 15_000) < 60_000
    assert reader.receiving == 30_000


def test_a_body_of_tiny_pieces_takes_its_bytes_and_no_more() -> None:
    reader = RequestReader()
    reader.feed(POST + b"Content-Length: 1000000\r\n\r\n")
    reader.next_request(**LIMITS)
    tracemalloc.start()
    for _ in range(10_000):
        reader.feed(bytes(2))
        reader.next_request(**LIMITS)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert reader.receiving == 20_000 and held < 40_000


def test_an_idle_connection_keeps_no_long_head() -> None:
    assert _traced_bytes(RequestReader(), HEALTH[:-2] + b"x: " + b"y" * 60_000 + b"\r\n\r\n") < 20_000


def test_tiny_chunks_are_read_a_little_at_a_time_and_arrive_whole() -> None:
    body = bytes(range(256)) * 400
    crumbs = b"".join(chunk(body[at : at + 1]) for at in range(len(body))) + b"0\r\n\r\n"
    assert len(crumbs) > 10 * MOST_CHUNKED_BYTES
    reader = RequestReader()
    reader.feed(POST + b"Transfer-Encoding: chunked\r\n\r\n" + crumbs)
    turns = 0
    while (request := reader.next_request(**LIMITS)) is None:
        assert reader.turn_over
        turns += 1
    assert request[1] == body and turns > 10

    async def scenario(rig: Rig) -> None:
        client = await rig.client()
        await client.send(POST + b"Transfer-Encoding: chunked\r\n\r\n" + crumbs + HEALTH)
        assert [(await client.answer()).status for _ in range(2)] == [200, 200]
        assert rig.replica.requests[0].body == body

    with_rig(scenario)


class _Socket(asyncio.Transport):
    """Takes what is written, as a client does that reads."""

    def __init__(self) -> None:
        super().__init__()
        self.written: list[bytes] = []

    def write(self, data: Any) -> None:
        self.written.append(bytes(data))

    @property
    def answers(self) -> int:
        return b"".join(self.written).count(b"HTTP/1.1 200 ")

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        pass

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass

    def abort(self) -> None:
        pass


def test_a_client_that_pipelines_lets_others_have_their_turn() -> None:
    async def scenario(rig: Rig) -> None:
        client, end = ClientConnection(rig.plane), _Socket()
        client.connection_made(end)
        client.data_received(HEALTH * 1_000)
        client.flush()
        assert end.answers == MOST_AT_ONCE
        await until(lambda: end.answers == 1_000)
        client.connection_lost(None)

    with_rig(scenario)


def test_requests_that_the_router_answers_itself_are_not_hoarded() -> None:
    """A client that asks and asks and reads no answer is made to wait by TCP, and goes on where it was."""

    async def scenario(rig: Rig) -> None:
        client = await rig.client(read_ahead=1_000)
        requests = 400_000
        client.writer.write(HEALTH * requests)
        transport = cast(asyncio.WriteTransport, client.writer.transport)
        seen: list[int] = []

        def rests() -> bool:
            seen.append(transport.get_write_buffer_size())
            return len(seen) > 50 and len(set(seen[-50:])) == 1

        await until(rests)
        assert transport.get_write_buffer_size() > 5_000_000  # the rest is in the kernel's buffers
        for _ in range(2_000):
            assert (await client.head()).status == 200
            await client.reader.readexactly(len(b'{"status":"ok"}'))
        client.leave()

    with_rig(scenario)


def test_what_was_made_at_the_start_is_not_collected_again_and_again() -> None:
    """A body of 350,000 empty lists sets off full collections; each looked at every module's objects."""
    assert gc.get_freeze_count() == 0
    before, thresholds = len(gc.get_objects()), gc.get_threshold()
    try:
        settle_garbage()
        assert gc.get_freeze_count() > before / 2 and len(gc.get_objects()) < before / 10
        counted = _collections()
        waiting: list[list[int]] = [[] for _ in range(4_000)]
        assert _collections() == counted, "set off by what 300 requests in flight are made of"
        del waiting
    finally:
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _collections() -> int:
    return sum(generation["collections"] for generation in gc.get_stats())
