"""Gives KV blocks to other replicas over TCP; see ``peer_wire``.

The engine's thread copies a few blocks at a time between two steps, when the peer has taken those before;
hashing and sending happen elsewhere. So a slow peer holds one piece of memory and no KV block, and the engine
never waits.
"""

import asyncio
import contextlib
import logging
import secrets
from collections.abc import Sequence as Row

from replica.contract.block_hash import TOKEN_BYTES, token_ids
from replica.engine import Engine
from replica.peers.peer_limits import PeerLimits
from replica.peers.peer_wire import (
    BUSY,
    END_LETTER,
    MAC_BYTES,
    MAGIC,
    NONCE_BYTES,
    OK,
    OTHER_MODEL,
    QUESTION,
    REFUSED,
    PeerError,
    Question,
    block_head,
    block_mac,
    question_sizes,
    read_question,
)
from replica.sequence import Sequence
from replica.server.engine_thread import EngineDead, EngineThread
from replica.server.served_counters import ServedCounters

log = logging.getLogger("warmroute.replica")

PIECE_BYTES = 4 * 2**20
"""Copied by the engine's thread at once, at most: about a millisecond."""
ASKING_AT_ONCE = 4
"""So many times the connections that are answered may be asking; more are closed at once."""
QUESTION_S = 5.0
"""For a peer to say what it wants."""


class PeerServer:
    """Listens for peers; runs in the event loop that ``start`` is awaited in."""

    def __init__(self, thread: EngineThread, limits: PeerLimits, *, longest_prompt: int) -> None:
        """``longest_prompt``: more tokens than that are no question."""
        self._thread = thread
        self._limits = limits
        self._longest_prompt = longest_prompt
        self._key = limits.key
        self._asking: set[asyncio.Task[None]] = set()
        """All there are."""
        self._open: set[asyncio.Task[None]] = set()
        """Those that are answered."""
        self._server: asyncio.Server | None = None
        self.counters = ServedCounters()
        self.address = ""
        """Where it really listens."""

    async def start(self) -> None:
        """Listen. Raises OSError where that fails."""
        assert self._limits.listen is not None
        host, _, port = self._limits.listen.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host.strip("[]"), int(port))
        self.address = f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def stop(self) -> None:
        """Listen no more, break what is under way."""
        if self._server is not None:
            self._server.close()
        for task in list(self._asking):
            task.cancel()
        await asyncio.gather(*self._asking, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._asking) >= ASKING_AT_ONCE * self._limits.connections:
            self.counters.busy += 1
            writer.close()
            return
        self._asking.add(task)
        room = len(self._open) < self._limits.connections
        if room:
            self._open.add(task)
        try:
            async with asyncio.timeout(self._limits.serve_s if room else QUESTION_S):
                await self._serve(reader, writer, room=room)
        except (OSError, EOFError, TimeoutError, EngineDead, asyncio.CancelledError):
            self.counters.broken += 1
        finally:
            self._open.discard(task)
            self._asking.discard(task)
            with contextlib.suppress(OSError):
                writer.transport.abort() if writer.transport.get_write_buffer_size() else writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, room: bool) -> None:
        nonce = secrets.token_bytes(NONCE_BYTES)
        writer.write(MAGIC + nonce)
        try:
            async with asyncio.timeout(QUESTION_S):
                question = await self._question(reader, nonce)
        except PeerError:
            self.counters.refused += 1
            writer.write(REFUSED)
            await writer.drain()
            return
        if not room:
            self.counters.busy += 1
            writer.write(BUSY)
        elif question.fingerprint != await self._thread.ask(lambda engine: engine.fingerprint):
            self.counters.refused += 1
            writer.write(OTHER_MODEL)
        else:
            writer.write(OK)
            await self._send(question, writer)
        await writer.drain()

    async def _question(self, reader: asyncio.StreamReader, nonce: bytes) -> Question:
        opening = await reader.readexactly(QUESTION.size)
        head_bytes, token_bytes = question_sizes(opening)
        if token_bytes > self._longest_prompt * TOKEN_BYTES:
            raise PeerError(f"{token_bytes // TOKEN_BYTES} tokens are more than any prompt here")
        said = opening + await reader.readexactly(head_bytes + token_bytes)
        return read_question(said, head_bytes, await reader.readexactly(MAC_BYTES), nonce, self._key)

    async def _send(self, question: Question, writer: asyncio.StreamWriter) -> None:
        # One token more than asked for, as a prompt's last token is never found cached.
        prompt = Sequence(
            "peer",
            [*token_ids(question.tokens), 0],
            1,
            salt=question.salt,
            adapter=question.adapter,
            multimodal=question.multimodal,
        )
        counters, places = self.counters, question.places
        piece = self._limits.piece_blocks(question.block_bytes, PIECE_BYTES)
        writer.transport.set_write_buffer_limits(high=piece * question.block_bytes // 2)
        for first in range(0, len(places), piece):
            wanted = places[first : first + piece]

            def lend(engine: Engine, wanted: Row[int] = wanted) -> list[tuple[bytes, memoryview]]:
                try:
                    return engine.lend(prompt, wanted)
                except (RuntimeError, MemoryError):  # torch's own for "no memory" is the first
                    log.exception("a peer cannot be given KV")
                    return []

            lent = await self._thread.ask(lend)
            macs = await asyncio.to_thread(self._macs, question, lent)
            for number, (_, content), mac in zip(wanted, lent, macs, strict=False):
                if len(content) != question.block_bytes:
                    raise EOFError("blocks of another size")
                writer.write(block_head(number, len(content), mac))
                writer.write(content)
            await writer.drain()
            counters.blocks += len(lent)
            counters.size_bytes += len(lent) * question.block_bytes
            if len(lent) < len(wanted):
                counters.partial += 1
                writer.write(END_LETTER)
                return
        counters.whole += 1

    def _macs(self, question: Question, lent: Row[tuple[bytes, memoryview]]) -> list[bytes]:
        return [block_mac(self._key, question.fingerprint, name, content) for name, content in lent]
