"""Pulls blocks of a prompt from another replica over TCP, in a thread of its own; see ``peer_wire``."""

import contextlib
import hmac
import socket
import threading
from collections.abc import Iterator

from replica.kv_cache.tier_transport import Trouble
from replica.peers.peer_wire import (
    BLOCK,
    BLOCK_LETTER,
    END_LETTER,
    GREETING_BYTES,
    MAGIC,
    OK,
    PeerError,
    Question,
    block_mac,
    written_question,
)

CONNECT_S = 1.0
STALL_S = 5.0
"""A peer that sends nothing for so long is given up. The fetch itself is given up sooner where that pays."""


class Stopped(Exception):
    """The blocks end before the last one asked for; ``trouble`` says why."""

    def __init__(self, trouble: Trouble, why: str) -> None:
        super().__init__(why)
        self.trouble = trouble


class PeerCall:
    """One question to one peer. ``close`` may come from another thread, and ends it at once."""

    def __init__(self, address: str, question: Question, block_hashes: dict[int, bytes], key: bytes) -> None:
        """``block_hashes``: what each block asked for is, by its number."""
        self._address = address
        self._question = question
        self._block_hashes = block_hashes
        self._key = key
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._closed = False

    def blocks(self) -> Iterator[tuple[int, bytearray]]:
        """(number, KV) of each block, in order, verified. Raises Stopped before the first that is missing."""
        try:
            yield from self._blocks()
        except (OSError, PeerError) as error:
            raise Stopped(Trouble.FAILED, f"peer {self._address}: {error}") from error
        finally:
            self.close()

    def close(self) -> None:
        """Nobody wants the rest."""
        with self._lock:
            self._closed = True
            connection, self._connection = self._connection, None
        if connection is not None:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _blocks(self) -> Iterator[tuple[int, bytearray]]:
        host, _, port = self._address.rpartition(":")
        connection = socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_S)
        with self._lock:
            if self._closed:
                connection.close()
                return
            self._connection = connection
        connection.settimeout(STALL_S)
        greeting = _exactly(connection, GREETING_BYTES)
        if greeting[: len(MAGIC)] != MAGIC:
            raise PeerError(f"it speaks another version: {bytes(greeting[: len(MAGIC)])!r}")
        nonce = bytes(greeting[len(MAGIC) :])
        connection.sendall(written_question(self._question, nonce, self._key))
        status = bytes(_exactly(connection, 1))
        if status != OK:
            raise PeerError(f"it answered {status!r}")
        for place in self._question.places:
            letter = bytes(_exactly(connection, 1))
            if letter == END_LETTER:
                raise Stopped(Trouble.GONE, f"peer {self._address} has no block {place}")
            if letter != BLOCK_LETTER:
                raise PeerError(f"it sent {letter!r} where a block begins")
            number, size, mac = BLOCK.unpack(_exactly(connection, BLOCK.size))
            if (number, size) != (place, self._question.block_bytes):
                raise Stopped(Trouble.CORRUPT, f"block {number} of {size} bytes instead of {place}")
            content = _exactly(connection, size)
            expected = block_mac(self._key, self._question.fingerprint, self._block_hashes[place], content)
            if not hmac.compare_digest(mac, expected):
                raise Stopped(Trouble.CORRUPT, f"block {place} is not what was asked for")
            yield place, content


def _exactly(connection: socket.socket, size: int) -> bytearray:
    """The next ``size`` bytes. Raises PeerError when they end before that."""
    content = bytearray(size)
    view, came = memoryview(content), 0
    while came < size:
        count = connection.recv_into(view[came:])
        if not count:
            raise PeerError("it closed the connection")
        came += count
    return content
