"""Files of JSON objects, one a line, plain or gzip: traces and request logs."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from sim.workload.trace import TraceError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
"""Before the first line of files that some editors wrote."""
Row = tuple[int, dict[str, Any]]
"""(line, counted from 1; the object on it)."""


def json_lines(path: Path, expected: str) -> Iterator[Row]:
    """The rows of ``path``; empty lines are passed over. ``expected`` says in messages what a row holds.

    Raises ``TraceError`` with file, line and what was found.
    """
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except (OSError, EOFError, zlib.error) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    for number, line in enumerate(raw.removeprefix(BYTE_ORDER_MARK).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            row = orjson.loads(line)
        except orjson.JSONDecodeError as error:
            raise TraceError(f"{path}, line {number}: not JSON ({error}); expected {expected}") from error
        if type(row) is not dict:
            raise TraceError(f"{path}, line {number}: a JSON {type(row).__name__}, expected {expected}")
        yield number, row
