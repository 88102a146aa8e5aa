"""One router alone: nothing is shared. With ``snapshot:`` what was learned survives a restart, in a file.

A router that shares keeps such a file, too, for a start without the store.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from router.routing.fleet import Fleet
from router.state.knowledge import taken_in, written_down
from router.state.shared_state import StateReport
from router.state.wire import WireError, decode_chunk, encode_chunk
from router.state_config import StateConfig

log = logging.getLogger("warmroute.state")

LENGTH_BYTES = 4
MAX_CHUNK_BYTES = 64 * 1024 * 1024
READ_CHUNKS_AT_ONCE = 16
"""Between so many chunks, other work of the loop gets its turn."""


class MemoryState:
    """Reads the file at ``start``, writes it every ``snapshot_interval_s`` and at ``stop``."""

    def __init__(
        self, config: StateConfig, fleet: Fleet, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._clock = clock
        self._file = None if config.snapshot is None else Path(config.snapshot)
        self._interval_s = config.snapshot_interval_s
        self._task: asyncio.Task[None] | None = None
        self._fault: str | None = None
        self._changes = 0
        self._since = clock()
        self._warmed_from: str | None = None
        self._written: bool | None = None

    async def start(self, *, read: bool = True) -> None:
        """Read the file, if there is one and it is wanted; write it from now on."""
        if self._file is not None:
            if read:
                await self._read(self._file)
            self._task = asyncio.create_task(self._write_now_and_then(self._file), name="snapshot")

    async def stop(self) -> None:
        """Write the file once more."""
        if self._task is None or self._file is None:
            return
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task
        self._task = None
        await self._write(self._file)

    def apply(self, config: StateConfig) -> None:
        """Nothing: nobody logs in anywhere."""

    def report(self) -> StateReport:
        """How it stands."""
        return StateReport(
            "memory",
            "alone",
            self._fault,
            self._clock() - self._since,
            self._changes,
            warmed_from=self._warmed_from,
            snapshot_written=self._written,
        )

    async def _write_now_and_then(self, file: Path) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            await self._write(file)

    async def _read(self, file: Path) -> None:
        try:
            data = await asyncio.to_thread(file.read_bytes)
        except FileNotFoundError:  # the first start: a place that cannot be written to is to be known now
            await self._write(file)
            return
        except OSError as error:
            self._failed(f"snapshot {file} cannot be read: {error.strerror}; starting without")
            return
        try:
            for number, chunk in enumerate(_chunks(data)):
                taken_in(self._fleet, "", decode_chunk(chunk), self._clock())
                if number % READ_CHUNKS_AT_ONCE == 0:
                    await asyncio.sleep(0)
        except WireError as error:
            self._failed(f"snapshot {file} is damaged ({error}); using what could be read")
            return
        self._warmed_from = str(file)
        log.info("knows what %s had kept", file)

    async def _write(self, file: Path) -> None:
        """Into a new file, which then takes the old one's place: a crash leaves one or the other, whole."""
        parts = []
        for chunk in written_down(self._fleet):
            data = encode_chunk(chunk)
            parts.append(len(data).to_bytes(LENGTH_BYTES, "big") + data)
            await asyncio.sleep(0)
        try:
            await asyncio.to_thread(_replace, file, b"".join(parts))
        except OSError as error:
            self._written = False
            self._failed(f"snapshot {file} cannot be written: {error.strerror}; a restart will be cold")
        else:
            self._written = True
            self._works()

    def _failed(self, fault: str) -> None:
        if fault != self._fault:
            self._fault, self._since = fault, self._clock()
            self._changes += 1
            log.warning("%s", fault)

    def _works(self) -> None:
        if self._fault is not None:
            self._fault, self._since = None, self._clock()
            self._changes += 1
            log.info("the snapshot is written again")


def _chunks(data: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(data):
        start = at + LENGTH_BYTES
        length = int.from_bytes(data[at:start], "big")
        at = start + length
        if length > MAX_CHUNK_BYTES or at > len(data):
            raise WireError("it is cut short")
        yield data[start:at]


def _replace(file: Path, data: bytes) -> None:
    """Readable by the router's user alone: who reads it can test guesses of prompts against its keys."""
    part = file.with_name(f"{file.name}.{os.getpid()}.part")
    try:
        with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as out:
            out.write(data)
            out.flush()
            os.fsync(out.fileno())
        part.replace(file)
    except OSError:
        part.unlink(missing_ok=True)
        raise
