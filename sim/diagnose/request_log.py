"""Reads a request log: JSON lines, one request each, plain or gzip.

A row is an OpenAI request body, or an object around one::

    {"time": 1764403200.5, "app": "support", "tenant": "t1", "session": "c42", "replica": "10.0.0.11:8000",
     "policy": "predicted_finish", "body": {"model": "m", "messages": [...]}, "prompt_tokens": 3300,
     "cached_tokens": 2896, "matched_tokens": 2896, "output_tokens": 120, "ttft_ms": 85.0}

All but the prompt is optional. ``time`` is seconds (or an ISO date); ``request`` may stand for ``body`` and
OpenAI's ``usage`` for the three counts. Instead of words a row may have ``prompt_token_ids``, or the chained
keys of its full blocks: ``block_keys`` with ``block_tokens`` and ``prompt_tokens``, or with ``text_bytes``,
as the router's own log has them for prompts that it reads as text.
"""

import gzip
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from router.routing.prompt_blocks import FIRST_BLOCK_BYTES, TEXT_LAYOUT
from sim.workload.json_lines import json_lines
from sim.workload.trace import TraceError

ID_LIMIT = 1 << 31
BYTES_PER_TOKEN = 4
TEXT_BLOCK_TOKENS = FIRST_BLOCK_BYTES // BYTES_PER_TOKEN
PROMPT_FIELDS = ("messages", "prompt", "input")
EXPECTED = (
    "an OpenAI request body (messages, prompt or input), or an object with body, prompt_token_ids or "
    "block_keys"
)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One row. ``None`` is "not told"."""

    line: int
    time_s: float | None = None
    app: str | None = None
    session: str | None = None
    replica: str | None = None
    policy: str | None = None
    """By which the router chose it."""
    body: Mapping[str, Any] | None = None
    token_ids: tuple[int, ...] | None = None
    block_keys: tuple[int, ...] | None = None
    block_tokens: int | None = None
    text_tokens: int | None = None
    """Estimated length of a prompt that is known by keys of its text."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    matched_tokens: int | None = None
    """What the router believed to be cached."""
    output_tokens: int | None = None
    ttft_ms: float | None = None


def hash_part(key: int, part: int) -> int:
    """A name for a part of the block that ``key`` names."""
    return int.from_bytes(blake2b(b"%d/%d" % (key, part), digest_size=8).digest(), "little")


def is_request_log(path: Path) -> bool:
    """Whether the first row of ``path`` is a request rather than a row of a trace."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
        with gzip.open(path) if packed else path.open("rb") as file:
            first = next((line for line in file if line.strip()), b"")
        row = orjson.loads(first)
    except (OSError, EOFError, zlib.error, orjson.JSONDecodeError):
        return False  # whoever reads it next says why
    return isinstance(row, dict) and any(
        name in row for name in (*PROMPT_FIELDS, "body", "request", "prompt_token_ids", "block_keys")
    )


def read_request_log(path: str | Path, *, requests: int | None = None) -> list[LoggedRequest]:
    """The rows of ``path``, its first ``requests``. Raises ``TraceError`` with file, line and reason."""
    path = Path(path)
    made: list[LoggedRequest] = []
    for line, row in json_lines(path, EXPECTED):
        if requests is not None and len(made) >= requests:
            break
        made.append(_Row(path, line, row).read())
    if not made:
        raise TraceError(f"{path}: empty; expected one request per line: {EXPECTED}")
    return made


class _Row:
    """One row while it is read."""

    def __init__(self, path: Path, line: int, row: dict[str, Any]) -> None:
        self._where = f"{path}, line {line}"
        self._line = line
        self._row = row

    def read(self) -> LoggedRequest:
        row = self._row
        body = row if any(name in row for name in PROMPT_FIELDS) else row.get("body", row.get("request"))
        if body is not None and not isinstance(body, dict):
            raise self._wrong("body", body, "a JSON object")
        if body is not None and not any(body.get(name) for name in PROMPT_FIELDS):
            raise TraceError(f"{self._where}: the body has no messages, prompt or input; expected {EXPECTED}")
        usage = self._usage()
        details = usage.get("prompt_tokens_details") or {}
        tokens = self._numbers("prompt_token_ids")
        if tokens is None and body is not None:
            tokens = _ids_in(body.get("prompt"))
        keys, size = self._numbers("block_keys"), self._count("block_tokens", row.get("block_tokens"), 1)
        text_bytes = self._count("text_bytes", row.get("text_bytes"), 1)
        if keys is not None and text_bytes is not None:
            keys, size = self._text_keys(keys, text_bytes), TEXT_BLOCK_TOKENS
        if body is None and tokens is None and keys is None:
            raise TraceError(f"{self._where}: no prompt; expected {EXPECTED}")
        made = LoggedRequest(
            line=self._line,
            time_s=self._time(),
            app=self._name("app") or self._name("tenant"),
            session=self._name("session") or self._name("session_id"),
            replica=self._name("replica"),
            policy=self._name("policy"),
            body=body,
            token_ids=tokens,
            block_keys=keys,
            block_tokens=size,
            text_tokens=None if text_bytes is None else max(1, text_bytes // BYTES_PER_TOKEN),
            prompt_tokens=self._count(
                "prompt_tokens", row.get("prompt_tokens", usage.get("prompt_tokens")), 1
            ),
            cached_tokens=self._count(
                "cached_tokens", row.get("cached_tokens", details.get("cached_tokens"))
            ),
            matched_tokens=self._count("matched_tokens", row.get("matched_tokens")),
            output_tokens=self._count(
                "output_tokens", row.get("output_tokens", usage.get("completion_tokens"))
            ),
            ttft_ms=self._milliseconds("ttft_ms"),
        )
        self._check(made)
        return made

    def _check(self, made: LoggedRequest) -> None:
        if made.cached_tokens is not None:
            if made.prompt_tokens is None and made.token_ids is None:
                raise TraceError(
                    f"{self._where}: cached_tokens without prompt_tokens; expected both, as in OpenAI's usage"
                )
            most = made.prompt_tokens or len(made.token_ids or ())
            if made.cached_tokens > most:
                raise self._wrong("cached_tokens", made.cached_tokens, f"at most the {most} prompt tokens")
        if made.block_keys is not None and made.body is None and made.token_ids is None:
            size, tokens = made.block_tokens, made.text_tokens or made.prompt_tokens
            if size is None or tokens is None or len(made.block_keys) < tokens // size:
                raise TraceError(
                    f"{self._where}: {len(made.block_keys)} block_keys with block_tokens {size} and "
                    f"prompt_tokens {tokens}; expected a key for each full block"
                )

    def _text_keys(self, keys: tuple[int, ...], text_bytes: int) -> tuple[int, ...]:
        """Keys of blocks that double in size, as keys of equal blocks: parts of one are known together."""
        if len(keys) > TEXT_LAYOUT.blocks(text_bytes):
            raise self._wrong(
                "block_keys", len(keys), f"at most the full blocks of {text_bytes} bytes of text"
            )
        made: list[int] = []
        for number, key in enumerate(keys):
            parts = (TEXT_LAYOUT.end(number + 1) - TEXT_LAYOUT.end(number)) // FIRST_BLOCK_BYTES
            made += [hash_part(key, part) for part in range(parts - 1)]
            made.append(key)
        made += [
            hash_part(text_bytes << 64 | self._line, part)
            for part in range(text_bytes // FIRST_BLOCK_BYTES - len(made))
        ]
        return tuple(made)

    def _usage(self) -> dict[str, Any]:
        usage = self._row.get("usage")
        if usage is None and isinstance(self._row.get("response"), dict):
            usage = self._row["response"].get("usage")
        return usage if isinstance(usage, dict) else {}

    def _time(self) -> float | None:
        value = self._row.get("time")
        if value is None:
            return None
        if isinstance(value, str):
            try:
                return datetime.fromisoformat(value).timestamp()
            except ValueError:
                raise self._wrong("time", value, "seconds, or a date such as 2026-11-29T12:00:00Z") from None
        return self._finite("time", value)

    def _milliseconds(self, name: str) -> float | None:
        value = self._row.get(name)
        return None if value is None else self._finite(name, value)

    def _finite(self, name: str, value: Any) -> float:
        if type(value) not in (int, float) or not abs(value) < float("inf"):
            raise self._wrong(name, value, "a number")
        return float(value)

    def _name(self, name: str) -> str | None:
        value = self._row.get(name)
        if value is None or value == "":
            return None
        if type(value) not in (str, int):
            raise self._wrong(name, value, "text")
        return str(value)

    def _count(self, name: str, value: Any, least: int = 0) -> int | None:
        if value is None:
            return None
        if type(value) is not int or value < least:
            raise self._wrong(name, value, f"a whole number, {least} or more")
        return int(value)

    def _numbers(self, name: str) -> tuple[int, ...] | None:
        value = self._row.get(name)
        if value is None:
            return None
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise self._wrong(name, type(value).__name__, "a list of whole numbers")
        if name == "prompt_token_ids" and not (value and all(0 <= item < ID_LIMIT for item in value)):
            raise self._wrong(name, "empty or out of range", f"token ids from 0 to {ID_LIMIT - 1}")
        return tuple(value)

    def _wrong(self, name: str, value: object, expected: str) -> TraceError:
        return TraceError(f"{self._where}: {name} is {value!r}; expected {expected}")


def _ids_in(prompt: Any) -> tuple[int, ...] | None:
    """Token ids, alone or in a list of one."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if isinstance(prompt, list) and prompt and all(type(i) is int and 0 <= i < ID_LIMIT for i in prompt):
        return tuple(prompt)
    return None
