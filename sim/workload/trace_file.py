"""Reads traces in Mooncake's form: JSON lines of lengths, times and block ids, plain or gzip.

One row is one request::

    {"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, ..., 2353]}

``timestamp`` is milliseconds. Rows with a ``session_id`` are turns of a conversation: they have no time of
their own but follow the answer to the turn before (ordered by ``turn``, else ``timestamp``, else as they
stand); ``delay`` (milliseconds) is the pause before a turn. There is one id per block of prompt, for all
blocks or for the full ones only. Nothing is repaired in silence: a row that does not add up is refused with
file, line and reason. What is read otherwise than it stands (rows out of order, replies of no tokens), and
times that look like seconds, are the trace's ``remarks``.
"""

from pathlib import Path
from typing import Any

from sim.workload.json_lines import Row, json_lines
from sim.workload.trace import Trace, TraceError, TraceRequest

DEFAULT_BLOCK_TOKENS = 512
OTHER_BLOCK_TOKENS = (16, 32, 64, 128, 256, 1024, 2048)
"""Tried in this order when the default disagrees with the lengths."""
ID_LIMIT = 1 << 64
STRANGE_REQUESTS_PER_S = 100.0
"""On average, over a whole file: more is rare in milliseconds, and one in ten seconds in seconds."""


def read_trace(path: str | Path, *, block_tokens: int | None = None, requests: int | None = None) -> Trace:
    """The trace in ``path``; with ``requests``, its first so many rows.

    ``block_tokens`` is the tokens one id stands for; without it 512, or the first other usual size that
    agrees with every row. Raises ``TraceError``.
    """
    path = Path(path)
    rows = list(json_lines(path, f"an object with {_FIELDS}"))
    if not rows:
        raise TraceError(f"{path}: empty; expected one JSON object per line with {_FIELDS}")
    remarks: list[str] = []
    if all("timestamp" in row and "session_id" not in row for _, row in rows):
        as_written = [line for line, _ in rows]
        rows.sort(key=lambda row: _time(path, *row))
        remarks += _moved(as_written, [line for line, _ in rows], "by timestamp")
    elif any("session_id" in row for _, row in rows):
        rows = _by_session(path, rows, remarks)
    for line, row in rows:
        _check_lengths(path, line, row)
    size = block_tokens or _block_tokens(path, rows)
    made = tuple(_request(path, line, row, size) for line, row in rows[:requests])
    _check_chains(path, rows, made)
    return Trace(path.name, size, made, (*remarks, *_strange(rows[:requests])))


_FIELDS = "input_length, output_length, hash_ids and timestamp or session_id"


def _time(path: Path, line: int, row: dict[str, Any]) -> float:
    value = row["timestamp"]
    if type(value) not in (int, float) or not abs(value) < float("inf"):
        raise TraceError(f"{path}, line {line}: timestamp is {value!r}, expected milliseconds as a number")
    return float(value)


def _moved(as_written: list[int], ordered: list[int], by: str) -> list[str]:
    """What to say of rows, by line, that do not stand in their order.

    >>> _moved([1, 2, 3], [1, 3, 2], "by timestamp")
    ['2 rows are not in order, the first in line 2: sorted by timestamp']
    """
    moved = [line for line, other in zip(as_written, ordered, strict=True) if line != other]
    if not moved:
        return []
    return [f"{len(moved)} rows are not in order, the first in line {min(moved)}: sorted {by}"]


def _strange(rows: list[Row]) -> list[str]:
    """What is allowed in checked ``rows`` but may not be meant."""
    remarks = []
    silent = [line for line, row in rows if row["output_length"] == 0]
    if silent:
        remarks.append(
            f"output_length is 0 in {len(silent)} rows, the first in line {min(silent)}: read as 1 token"
        )
    times_ms = [row["timestamp"] for _, row in rows if "timestamp" in row and "session_id" not in row]
    span_s = (max(times_ms) - min(times_ms)) / 1e3 if times_ms else 0.0
    if span_s and (len(times_ms) - 1) / span_s > STRANGE_REQUESTS_PER_S:
        remarks.append(
            f"{len(times_ms)} requests in {span_s:g} s, as timestamps are read as milliseconds: if they are "
            "seconds, multiply them by 1000"
        )
    return remarks


def _by_session(path: Path, rows: list[Row], remarks: list[str]) -> list[Row]:
    """Session by session in order of first appearance, turn by turn; ``remarks`` gets what was sorted."""
    sessions: dict[str, list[Row]] = {}
    for line, row in rows:
        session = row.get("session_id")
        if type(session) not in (str, int):
            raise TraceError(
                f"{path}, line {line}: session_id is {session!r}, expected text or a number, as in the other "
                "rows; a trace is either all sessions or all timestamps"
            )
        sessions.setdefault(str(session), []).append((line, row))
    ordered: list[Row] = []
    as_written = [line for turns in sessions.values() for line, _ in turns]
    for name, turns in sessions.items():
        if all("turn" in row for _, row in turns):
            seen: dict[Any, int] = {}
            for line, row in turns:
                turn = row["turn"]
                if type(turn) is not int:
                    raise TraceError(f"{path}, line {line}: turn is {turn!r}, expected a whole number")
                if turn in seen:
                    raise TraceError(
                        f"{path}, line {line}: session {name} has turn {turn} already in line {seen[turn]}"
                    )
                seen[turn] = line
            turns.sort(key=lambda turn: turn[1]["turn"])
        elif all("timestamp" in row for _, row in turns):
            turns.sort(key=lambda turn: _time(path, *turn))
        ordered.extend(turns)
    remarks += _moved(as_written, [line for line, _ in ordered], "within their sessions")
    return ordered


def _check_lengths(path: Path, line: int, row: dict[str, Any]) -> None:
    missing = [name for name in ("input_length", "output_length", "hash_ids") if name not in row]
    if "timestamp" not in row and "session_id" not in row:
        missing.append("timestamp (or session_id)")
    if missing:
        raise TraceError(f"{path}, line {line}: {', '.join(missing)} missing; a row has {_FIELDS}")
    for name, least in (("input_length", 1), ("output_length", 0)):
        if type(row[name]) is not int or row[name] < least:
            raise TraceError(
                f"{path}, line {line}: {name} is {row[name]!r}, expected a whole number of tokens, "
                f"{least} or more"
            )
    ids = row["hash_ids"]
    if type(ids) is not list:
        raise TraceError(f"{path}, line {line}: hash_ids is {ids!r}, expected a list of whole numbers")
    for block in ids:
        if type(block) is not int or not -(ID_LIMIT >> 1) <= block < ID_LIMIT:
            raise TraceError(
                f"{path}, line {line}: block id {block!r} in hash_ids, expected a whole number of 64 bits"
            )


def _block_tokens(path: Path, rows: list[Row]) -> int:
    """The first usual block size that agrees with every row; the default when none does."""
    if not any(row["hash_ids"] for _, row in rows):
        raise TraceError(
            f"{path}: hash_ids is empty in every row; expected ids, or the block size of a trace whose "
            "prompts are all shorter (--block-size)"
        )
    for size in (DEFAULT_BLOCK_TOKENS, *OTHER_BLOCK_TOKENS):
        if all(_agrees(len(row["hash_ids"]), row["input_length"], size) for _, row in rows):
            return size
    return DEFAULT_BLOCK_TOKENS


def _agrees(ids: int, tokens: int, size: int) -> bool:
    return tokens // size <= ids <= -(-tokens // size)


def _request(path: Path, line: int, row: dict[str, Any], size: int) -> TraceRequest:
    ids, tokens = row["hash_ids"], row["input_length"]
    full, last = tokens // size, -(-tokens // size)
    if not full <= len(ids) <= last:
        raise TraceError(
            f"{path}, line {line}: {len(ids)} hash_ids, but {tokens} tokens in blocks of {size} need {full}"
            + (f" (full blocks) or {last}" if last > full else "")
            + "; give the trace's own block size if it is another (--block-size)"
        )
    session = row.get("session_id")
    delay = row.get("delay")
    if delay is not None and (type(delay) not in (int, float) or not 0 <= delay < float("inf")):
        raise TraceError(f"{path}, line {line}: delay is {delay!r}, expected milliseconds, 0 or more")
    return TraceRequest(
        prompt_tokens=tokens,
        output_tokens=max(1, row["output_length"]),
        block_ids=tuple(block & (ID_LIMIT - 1) for block in ids[:full]),
        timestamp_ms=_time(path, line, row) if "timestamp" in row else None,
        session=None if session is None else str(session),
        think_ms=delay,
    )


def _check_chains(path: Path, rows: list[Row], made: tuple[TraceRequest, ...]) -> None:
    """An id must always follow the same id: it names the block *and* all before it."""
    parents: dict[int, tuple[int | None, int]] = {}
    for (line, _), request in zip(rows, made, strict=False):
        parent: int | None = None
        for block in request.block_ids:
            known, first_line = parents.setdefault(block, (parent, line))
            if known != parent:
                raise TraceError(
                    f"{path}, line {line}: block id {block} follows {_name(parent)} here and {_name(known)} "
                    f"in line {first_line}; an id has to name a block with everything before it"
                )
            parent = block


def _name(block: int | None) -> str:
    return "nothing" if block is None else str(block)
