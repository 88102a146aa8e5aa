"""Recorded conversations with their text (tau-bench's JSON): every answer of the assistant is one request.

The file is a JSON array of episodes; ``traj`` is the list of messages. The prompt of a request is all that
was said before, as recorded, so a replay does not depend on what the model under test answers. Tool calls
and results become plain text in assistant and user messages: every chat template takes them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import orjson

from sim.workload.trace import Trace, TraceError, TraceRequest

Message = dict[str, str]

CHARACTERS_PER_TOKEN = 4
"""An estimate, for lengths only; replicas report the truth."""
BLOCK_TOKENS = 16


@dataclass(frozen=True, slots=True)
class TextSessions:
    """A trace in sessions with the words that belong to it."""

    trace: Trace
    _said: tuple[tuple[Sequence[Message], int], ...]

    def messages(self, request: int) -> list[Message]:
        """The messages of request number ``request`` of the trace."""
        conversation, length = self._said[request]
        return list(conversation[:length])

    def up_to(self, prompt_tokens: int | None) -> "TextSessions":
        """Every conversation up to its last prompt of at most ``prompt_tokens`` (estimated) tokens.

        Raises ``TraceError`` when none is left.
        """
        if prompt_tokens is None:
            return self
        trace = self.trace
        kept = [k for k, request in enumerate(trace.requests) if request.prompt_tokens <= prompt_tokens]
        if not kept:
            shortest = min(request.prompt_tokens for request in trace.requests)
            raise TraceError(
                f"{trace.name}: no prompt of {prompt_tokens} tokens or less; the shortest has {shortest}"
            )
        requests = tuple(trace.requests[k] for k in kept)
        return TextSessions(
            Trace(trace.name, trace.block_tokens, requests), tuple(self._said[k] for k in kept)
        )


def is_text_sessions(path: Path) -> bool:
    """Whether ``path`` holds a JSON array, as recorded conversations do."""
    try:
        with path.open("rb") as file:
            return file.read(64).lstrip()[:1] == b"["
    except OSError:
        return False  # whoever reads it next says why


def read_text_sessions(path: str | Path, *, requests: int | None = None) -> TextSessions:
    """The conversations in ``path``, its first ``requests`` requests. Raises ``TraceError``."""
    path = Path(path)
    try:
        episodes = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise TraceError(f"{path}: cannot be read: {error}") from error
    made: list[TraceRequest] = []
    said: list[tuple[Sequence[Message], int]] = []
    for number, episode in enumerate(episodes):
        turns = episode.get("traj") if type(episode) is dict else None
        if type(turns) is not list:
            raise TraceError(
                f"{path}, episode {number}: no list 'traj' of messages; a JSON list is read as tau-bench's "
                "conversations, a trace has one JSON object per line"
            )
        conversation = [_message(path, number, turn) for turn in turns]
        _add_requests(f"episode {number}", conversation, made, said)
        if requests is not None and len(made) >= requests:
            break
    if not made:
        raise TraceError(f"{path}: no answer of an assistant in it; expected recorded conversations")
    return TextSessions(Trace(path.name, BLOCK_TOKENS, tuple(made[:requests])), tuple(said[:requests]))


def _message(path: Path, episode: int, turn: Any) -> Message:
    role = turn.get("role") if type(turn) is dict else None
    if type(role) is not str:
        raise TraceError(f"{path}, episode {episode}: a message without role; expected role and content")
    content = turn.get("content") or ""
    text = content if type(content) is str else orjson.dumps(content).decode()
    for call in turn.get("tool_calls") or ():
        text += ("\n" if text else "") + "tool call: " + orjson.dumps(call.get("function", call)).decode()
    if role == "tool":
        return {"role": "user", "content": f"tool result of {turn.get('name', 'tool')}: {text}"}
    return {"role": role, "content": text}


def _add_requests(
    session: str,
    conversation: Sequence[Message],
    made: list[TraceRequest],
    said: list[tuple[Sequence[Message], int]],
) -> None:
    chain = b""
    blocks: list[int] = []
    unhashed = ""
    length = 0
    width = BLOCK_TOKENS * CHARACTERS_PER_TOKEN
    for index, message in enumerate(conversation):
        if message["role"] == "assistant" and index:
            answer = max(1, len(message["content"]) // CHARACTERS_PER_TOKEN)
            tokens = max(1, length // CHARACTERS_PER_TOKEN)
            made.append(TraceRequest(tokens, answer, tuple(blocks), session=session))
            said.append((conversation, index))
        text = f"{message['role']}: {message['content']}\n"
        length += len(text)
        unhashed += text
        while len(unhashed) >= width:
            chain = blake2b(chain + unhashed[:width].encode(), digest_size=8).digest()
            blocks.append(int.from_bytes(chain, "little"))
            unhashed = unhashed[width:]
