"""A TCP link to a local port that takes its time: each piece arrives ``delay_s`` late, in both directions."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress


class SlowLink:
    """Listens on ``port`` while in use. ``delay_s`` may change at any time."""

    def __init__(self, target_port: int, delay_s: float = 0.0) -> None:
        self.port = 0
        self.delay_s = delay_s
        self._target_port = target_port
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(1 << 16):
                await asyncio.sleep(self.delay_s)
                sink.write(piece)
                await sink.drain()
        sink.close()
        self._writers.discard(sink)

    async def close(self) -> None:
        """Break every connection."""
        for task in list(self._tasks):
            task.cancel()
        for writer in self._writers:
            writer.close()


@asynccontextmanager
async def slow_link(target_port: int, delay_s: float = 0.0) -> AsyncIterator[SlowLink]:
    """A link for the length of a test."""
    link = SlowLink(target_port, delay_s)
    server = await asyncio.start_server(link._accept, "127.0.0.1", 0)
    link.port = server.sockets[0].getsockname()[1]
    try:
        yield link
    finally:
        server.close()
        await link.close()
