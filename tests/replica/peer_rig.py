"""An engine that lends its KV over a real socket, and links to it that break in every way."""

import asyncio
import contextlib
import random
import threading
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from replica.engine import Engine
from replica.engine_limits import TierLimits
from replica.kv_cache.tier_transport import PeerOffer
from replica.peers.peer_limits import PeerLimits
from replica.peers.peer_wire import GREETING_BYTES, MAGIC
from replica.server.engine_thread import EngineThread
from replica.server.peer_server import PeerServer
from tests.replica.models import finish_all, greedy_request, make_engine

SECRET = "between-us"
ANY_BLOCKS = 1_000
FAULTS = ("refused", "silent", "older", "flipped", "cut", "stalled", "garbage")


class Link:
    """Passes bytes between whoever connects and the peer, or breaks as ``fault`` says."""

    def __init__(self, peer: str, fault: str, rng: random.Random) -> None:
        self._peer = peer
        self._fault = fault
        self._rng = rng
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.address = ""
        self.connections = 0

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._passes, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _passes(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            await self._break_or_pass(reader, writer)
        writer.close()
        self._tasks.discard(task)

    async def stop(self) -> None:
        """Break what is under way."""
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _break_or_pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        fault, rng = self._fault, self._rng
        if fault == "refused":
            return
        if fault == "silent":
            await reader.read()
            return
        if fault == "garbage":
            writer.write(rng.randbytes(4_096))
            await reader.read()
            return
        host, _, port = self._peer.rpartition(":")
        from_peer, to_peer = await asyncio.open_connection(host, int(port))
        asking = asyncio.create_task(_copy(reader, to_peer))
        self._tasks.add(asking)
        asking.add_done_callback(self._tasks.discard)
        greeting = await from_peer.readexactly(GREETING_BYTES)
        if fault == "older":
            greeting = b"wrpeer00" + greeting[len(MAGIC) :]
        writer.write(greeting)
        at = rng.randrange(1, 12_000)
        while data := await from_peer.read(4_096):
            if fault != "none" and 0 <= at < len(data):
                if fault == "flipped":
                    data = data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :]
                elif fault == "cut":
                    writer.write(data[:at])
                    break
                elif fault == "stalled":
                    writer.write(data[:at])
                    await asking  # until nobody asks any more
                    break
            at -= len(data)
            writer.write(data)
            await writer.drain()
        asking.cancel()
        to_peer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65_536):
            writer.write(data)
            await writer.drain()


class LendingPeer:
    """An engine in a thread of its own behind a peer server, with links to it."""

    def __init__(self, engine: Engine, links: Sequence[str] = ("none",), **limits: Any) -> None:
        """``links``: the fault of each, "none" for one that works."""
        self.engine = engine
        rng = random.Random(7)
        self._limits = PeerLimits(SECRET, listen="127.0.0.1:0", **limits)
        self._faults = [(fault, random.Random(rng.random())) for fault in links]
        self.links: list[Link] = []
        self._ready = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self.server: PeerServer
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._run(),))

    def __enter__(self) -> "LendingPeer":
        self._thread.start()
        assert self._ready.wait(10.0)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(10.0)

    async def _run(self) -> None:
        thread = EngineThread(self.engine, None)
        thread.start()
        self.server = PeerServer(thread, self._limits, longest_prompt=self.engine.limits.max_model_len)
        await self.server.start()
        for fault, rng in self._faults:
            link = Link(self.server.address, fault, rng)
            await link.start()
            self.links.append(link)
        self._ready.set()
        await self._over.wait()
        for one in self.links:
            await one.stop()
        await self.server.stop()
        await thread.stop()

    def offer(self, link: int = 0, blocks: int = ANY_BLOCKS) -> PeerOffer:
        """What a request may name."""
        return PeerOffer(self.links[link].address, blocks)


def lending_engine(prompts: Iterable[tuple[Sequence[int], str | None]], **limits: Any) -> Engine:
    """An engine whose cache holds these prompts, each with its salt."""
    engine = make_engine(
        **(
            {"kv_blocks": 2_000, "batch_invariant": True, "max_model_len": 1024}
            | {"tiers": TierLimits(peers=PeerLimits(SECRET))}
            | limits
        )
    )
    for number, (prompt, salt) in enumerate(prompts):
        finish_all(engine, [replace(greedy_request(f"warm {number}", prompt, 1), salt=salt)])
    return engine
