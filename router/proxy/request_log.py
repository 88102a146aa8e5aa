"""The request log: one JSON line per answered request, for ``warmroute diagnose``. Off unless configured.

A row is made on the event loop (some microseconds) and written by a thread, so a slow disk delays nobody;
when too many rows wait they are dropped and counted. Prompts are named by their block keys, which tell what
they share and nothing else; ``prompts: bodies`` writes them out.
"""

import logging
import os
import queue
import threading
import time
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from router.config import PolicyConfig, RequestLogConfig
from router.config_errors import ConfigError
from router.proxy.counters import Counters
from router.proxy.request_head import RequestHead
from router.routing.in_flight import Usage
from router.routing.prompt_blocks import TEXT_LAYOUT, Prompt

logger = logging.getLogger("warmroute.requests")

MOST_WAITING = 10_000
MOST_APP_BYTES = 128
CLOSE_LIMIT_S = 5.0
MIB = 1 << 20


class RequestLog:
    """Owned by the router, which closes it."""

    def __init__(self, config: RequestLogConfig, counters: Counters) -> None:
        """Raises ``ConfigError`` when the file cannot be written."""
        self.config = config
        self.policy = PolicyConfig()
        """By which requests are decided."""
        self.bodies = config.prompts == "bodies"
        """A request's body is wanted when it is answered."""
        self._app_mark = None if config.app_header is None else config.app_header.lower().encode() + b":"
        self._counters = counters
        self._path = Path(config.file)
        try:
            self._file: FileIO | None = _opened(self._path)
        except OSError as error:
            raise ConfigError(
                f"log.requests.file: {config.file} cannot be written: {error.strerror}; expected a file in a "
                "folder that exists"
            ) from None
        self._failed_rows = 0
        """Dropped since the last that could be written."""
        self._rows: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._write, name="request log", daemon=True)
        self._thread.start()

    def answered(
        self,
        head: RequestHead,
        body: bytes,
        prompt: Prompt,
        replica: str,
        matched_tokens: int,
        usage: Usage | None,
        ttft_s: float | None,
    ) -> None:
        """A request was answered whole. Without a prompt there is nothing to tell."""
        if not prompt.units:
            return
        if self._rows.qsize() >= MOST_WAITING:
            self._counters.request_log_dropped += 1
            return
        row: dict[str, Any] = {
            "time": round(time.time(), 3),
            "replica": replica,
            "policy": head.policy if head.policy in self.policy.selectable else self.policy.kind,
            "matched_tokens": matched_tokens,
        }
        if head.session is not None:
            row["session"] = head.session
        if prompt.tenant is not None:
            row["tenant"] = prompt.tenant.name
        app = self._app(head)
        if app is not None:
            row["app"] = app
        if ttft_s is not None:
            row["ttft_ms"] = round(1e3 * ttft_s, 3)
        if usage is not None:
            for name in ("prompt_tokens", "cached_tokens", "output_tokens"):
                value = getattr(usage, name)
                if value is not None:
                    row[name] = value
        if self.bodies and body:
            # As it came: a line break in JSON stands between values only, and one row is one line.
            text = body.replace(b"\n", b" ").replace(b"\r", b" ")
            self._rows.put(orjson.dumps(row)[:-1] + b',"body":' + text + b"}\n")
            return
        row["model"] = prompt.model
        row["block_keys"] = list(prompt.keys)
        if prompt.layout is TEXT_LAYOUT:
            row["text_bytes"] = prompt.units
        else:
            row["block_tokens"] = prompt.layout.end(1)
            row.setdefault("prompt_tokens", prompt.units)
        self._rows.put(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))

    def _app(self, head: RequestHead) -> str | None:
        mark = self._app_mark
        if mark is None:
            return None
        for line in head.kept:
            if line[: len(mark)].lower() == mark:
                return line[len(mark) :].strip()[:MOST_APP_BYTES].decode("latin-1")
        return None

    def close(self) -> None:
        """Write what waits."""
        self._rows.put(None)
        self._thread.join(CLOSE_LIMIT_S)

    # --- in the thread ----------------------------------------------------------------------------

    def _write(self) -> None:
        while (row := self._rows.get()) is not None:
            rows = [row]
            last = False
            while not self._rows.empty():
                more = self._rows.get()
                if more is None:
                    last = True
                    break
                rows.append(more)
            self._append(rows)
            if last:
                break
        self._leave_file()

    def _append(self, rows: list[bytes]) -> None:
        try:
            _write_whole(self._current_file(), b"".join(rows))
        except OSError as error:
            self._counters.request_log_dropped += len(rows)
            if not self._failed_rows:
                logger.error("%s cannot be written, rows are dropped: %s", self._path, error)
            self._failed_rows += len(rows)
        else:
            if self._failed_rows:
                logger.info("%s is written again; %d rows are missing", self._path, self._failed_rows)
            self._failed_rows = 0

    def _current_file(self) -> FileIO:
        """To append to: opened anew where somebody took it away, and not larger than it may be."""
        file = self._file
        if file is not None:
            found = os.fstat(file.fileno())
            taken = not self._is_there(found)
            if not taken and found.st_size >= self.config.rotate_mib * MIB:
                self._rotate()
                taken = True
            if taken:
                self._leave_file()
                file = None
        if file is None:
            file = self._file = _opened(self._path)
        return file

    def _is_there(self, found: os.stat_result) -> bool:
        """Whether the path still leads to the file that was ``found``, as far as can be seen."""
        try:
            return os.path.samestat(os.stat(self._path), found)
        except FileNotFoundError:
            return False
        except OSError:
            return True

    def _leave_file(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):
                file.close()

    def _rotate(self) -> None:
        """``FILE`` becomes ``FILE.1``, that ``FILE.2``, and so on; the last is removed.

        Where that fails half way, it goes on there the next time.
        """
        keep = self.config.keep
        if keep:
            for number in range(keep - 1, 0, -1):
                older = _numbered(self._path, number)
                if older.exists():
                    older.replace(_numbered(self._path, number + 1))
            self._path.replace(_numbered(self._path, 1))
        else:
            self._path.unlink()


def _opened(path: Path) -> FileIO:
    """To append to; readable by its owner alone, if it is new."""
    return FileIO(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "w")


def _write_whole(file: FileIO, rows: bytes) -> None:
    """All of ``rows`` or none: a disk that becomes full leaves no row cut off in the middle."""
    before = os.fstat(file.fileno()).st_size
    left = memoryview(rows)
    try:
        while left:
            left = left[file.write(left) :]
    except OSError:
        with suppress(OSError):
            os.ftruncate(file.fileno(), before)
        raise


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}")
