"""A trace by its name on the command line: a file, the one that comes with the package, or one made up."""

from collections.abc import Callable, Mapping
from importlib.resources import as_file, files
from pathlib import Path

from sim.workload.azure_file import is_azure_file, read_azure_file
from sim.workload.chat_mix import chat_trace
from sim.workload.hot_prefix import hot_prefix_trace
from sim.workload.rag_mix import RagMix, rag_trace
from sim.workload.strangers import strangers_trace
from sim.workload.text_sessions import TextSessions, is_text_sessions, read_text_sessions
from sim.workload.trace import Trace, TraceError
from sim.workload.trace_file import read_trace
from sim.workload.trimmed_chats import TrimmedChats, trimmed_chats_trace

SHIPPED_TRACE = "mooncake"
"""The first 1,000 requests of Mooncake's conversation trace (licence: ``data/NOTICE.txt``)."""
TIMED_REQUESTS = 2_000
"""Of made-up traces, unless another number is asked for."""


def _chats(requests: int | None, seed: int) -> Trace:
    return chat_trace(requests=requests, seed=seed)


def _timed(make: Callable[..., Trace], *arguments: object) -> Callable[[int | None, int], Trace]:
    return lambda requests, seed: make(*arguments, requests=requests or TIMED_REQUESTS, seed=seed)


MADE_UP: Mapping[str, tuple[str, Callable[[int | None, int], Trace]]] = {
    "chats": ("apps with system prompts, several turns each", _chats),
    "trimmed": ("chats whose oldest messages are dropped", _timed(trimmed_chats_trace)),
    "untrimmed": ("the same chats, nothing dropped", _timed(trimmed_chats_trace, TrimmedChats(None))),
    "rag": ("passages of a corpus in any order", _timed(rag_trace)),
    "rag-sorted": ("the same passages in one order", _timed(rag_trace, RagMix(sorted_passages=True))),
    "hot": ("one prefix suddenly popular", _timed(hot_prefix_trace)),
    "strangers": ("prompts that share nothing", _timed(strangers_trace)),
}
"""Seeded workloads by name: what they are, and how so many requests of them are made."""


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
    if path.is_file() and is_azure_file(path):
        return read_azure_file(path, requests=requests), None
    if path.exists():
        return read_trace(path, block_tokens=block_tokens, requests=requests), None
    if name == SHIPPED_TRACE:
        with as_file(files("sim.workload") / "data" / "mooncake_conversation_1000.jsonl") as shipped:
            return read_trace(shipped, block_tokens=block_tokens, requests=requests), None
    if name in MADE_UP:
        return MADE_UP[name][1](requests, seed), None
    raise TraceError(
        f"no file {name!r}; expected a trace file (JSON lines or Azure's CSV, plain or gzip), "
        f"{SHIPPED_TRACE!r} (the slice of Mooncake's conversation trace in the package), or one that is made "
        f"up: {made_up_names()}"
    )


def made_up_names() -> str:
    """For help and messages."""
    return ", ".join(f"{name} ({what})" for name, (what, _) in MADE_UP.items())
