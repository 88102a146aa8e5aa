"""Asks a publisher of KV events for batches it sent before, at its replay endpoint."""

import asyncio
import struct
from collections.abc import AsyncGenerator

import zmq
import zmq.asyncio

QUEUED_MESSAGES = 20_000
MESSAGE_BYTES = 64 * 1024 * 1024
SILENCE_S = 2.0
"""A replay that brings nothing for so long has failed."""
LIMIT_S = 20.0
END_OF_REPLAY = b"\xff" * 8
NUMBER = struct.Struct(">Q")


async def replay(
    context: "zmq.asyncio.Context", endpoint: str, start: int
) -> AsyncGenerator[list[bytes], None]:
    """Frames of every batch the publisher keeps from number ``start`` on, up to its mark of the end.

    Raises ``TimeoutError`` when it falls silent or takes too long, ``zmq.ZMQError``. Close it if you leave
    early (``contextlib.aclosing``).
    """
    socket = context.socket(zmq.DEALER)
    socket.setsockopt(zmq.LINGER, 0)
    socket.setsockopt(zmq.RCVHWM, QUEUED_MESSAGES)
    socket.setsockopt(zmq.MAXMSGSIZE, MESSAGE_BYTES)
    socket.setsockopt(zmq.IPV6, 1)
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    try:
        socket.connect(endpoint)
        await socket.send_multipart([b"", NUMBER.pack(start)])
        while True:
            async with asyncio.timeout_at(min(deadline, asyncio.get_running_loop().time() + SILENCE_S)):
                frames = await socket.recv_multipart()
            if len(frames) >= 2 and frames[-2] == END_OF_REPLAY:
                return
            yield frames
    finally:
        socket.close()
