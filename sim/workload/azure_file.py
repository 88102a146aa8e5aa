"""Azure's public traces of LLM services: arrival times and lengths, no prefixes.

CSV with columns TIMESTAMP, ContextTokens, GeneratedTokens (github.com/Azure/AzurePublicDataset, CC-BY-4.0;
2023 and 2024). Nothing is known of what prompts share, so every block has a name of its own.
"""

import csv
import gzip
import zlib
from datetime import UTC, datetime
from pathlib import Path

from sim.workload.trace import Trace, TraceError, TraceRequest

BLOCK_TOKENS = 512
COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def is_azure_file(path: Path) -> bool:
    """Whether the file begins with Azure's columns."""
    try:
        raw = path.read_bytes()[:2]
        text = (gzip.open if raw == b"\x1f\x8b" else open)(path, "rb").read(64)
    except (OSError, EOFError, zlib.error):
        return False  # whoever reads it next says why
    return text.lstrip(b"\xef\xbb\xbf").startswith(b"TIMESTAMP,ContextTokens")


def read_azure_file(path: str | Path, *, requests: int | None = None) -> Trace:
    """The trace in ``path``, its first ``requests`` rows in order of time. Raises ``TraceError``."""
    path = Path(path)
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    rows = csv.reader(text.splitlines())
    header = next(rows, None)
    if header is None or tuple(header[:3]) != COLUMNS:
        raise TraceError(f"{path}, line 1: columns are {header}; expected {', '.join(COLUMNS)}")
    made = [_row(path, number, row) for number, row in enumerate(rows, 2) if row]
    if not made:
        raise TraceError(f"{path}: no row; expected {', '.join(COLUMNS)}")
    as_written = [time_s for time_s, _, _ in made]
    made.sort(key=lambda row: row[0])
    moved = sum(one != row[0] for one, row in zip(as_written, made, strict=True))
    remarks = [f"{moved} rows are not in order: sorted by TIMESTAMP"] if moved else []
    empty = sum(not (prompt and output) for _, prompt, output in made)
    if empty:
        remarks.append(f"{empty} rows have a prompt or an answer of no token: read as 1")
    start_s = made[0][0]
    out: list[TraceRequest] = []
    next_id = 0
    for time_s, told_prompt, told_output in made[:requests]:
        prompt, output = max(1, told_prompt), max(1, told_output)
        blocks = prompt // BLOCK_TOKENS
        ids = tuple(range(next_id, next_id + blocks))
        next_id += blocks
        out.append(TraceRequest(prompt, output, ids, timestamp_ms=1e3 * (time_s - start_s)))
    return Trace(path.name, BLOCK_TOKENS, tuple(out), tuple(remarks))


def _row(path: Path, line: int, row: list[str]) -> tuple[float, int, int]:
    try:
        prompt, output = int(row[1]), int(row[2])
        if prompt < 0 or output < 0:
            raise ValueError
    except (ValueError, IndexError):
        raise TraceError(
            f"{path}, line {line}: {','.join(row)}; expected a time and two whole numbers of tokens"
        ) from None
    try:
        time = datetime.fromisoformat(row[0])
    except ValueError:
        raise TraceError(
            f"{path}, line {line}: TIMESTAMP is {row[0]!r}, expected a time such as 2023-11-16 18:15:46.68"
        ) from None
    if time.tzinfo is None:  # not this machine's zone, whose clocks may have changed meanwhile
        time = time.replace(tzinfo=UTC)
    return time.timestamp(), prompt, output
