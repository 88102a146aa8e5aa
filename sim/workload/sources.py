"""A trace by its name on the command line: a file, or one of the two that come with the package."""

from importlib.resources import as_file, files
from pathlib import Path

from sim.workload.chat_mix import chat_trace
from sim.workload.text_sessions import TextSessions, is_text_sessions, read_text_sessions
from sim.workload.trace import Trace, TraceError
from sim.workload.trace_file import read_trace

SHIPPED_TRACE = "mooncake"
"""The first 1,000 requests of Mooncake's conversation trace (licence: ``data/NOTICE.txt``)."""
CHAT_MIX = "chats"
"""A seeded mix of multi-turn chats; see ``chat_mix``."""


def open_trace(
    name: str, *, block_tokens: int | None = None, requests: int | None = None, seed: int = 1
) -> Trace:
    """The trace ``name`` stands for, cut to ``requests``; files go before names. Raises ``TraceError``."""
    return open_text_or_trace(name, block_tokens=block_tokens, requests=requests, seed=seed)[0]


def open_text_or_trace(
    name: str, *, block_tokens: int | None = None, requests: int | None = None, seed: int = 1
) -> tuple[Trace, TextSessions | None]:
    """As ``open_trace``; and where the file holds conversations, their words."""
    path = Path(name)
    if path.is_file() and is_text_sessions(path):
        text = read_text_sessions(path, requests=requests)
        return text.trace, text
    if path.exists():
        return read_trace(path, block_tokens=block_tokens, requests=requests), None
    if name == SHIPPED_TRACE:
        with as_file(files("sim.workload") / "data" / "mooncake_conversation_1000.jsonl") as shipped:
            return read_trace(shipped, block_tokens=block_tokens, requests=requests), None
    if name == CHAT_MIX:
        return chat_trace(seed=seed).head(requests), None
    raise TraceError(
        f"no file {name!r}; expected a trace file (JSON lines, plain or gzip), {SHIPPED_TRACE!r} (the slice "
        f"of Mooncake's conversation trace in the package) or {CHAT_MIX!r} (a seeded mix of chats)"
    )
