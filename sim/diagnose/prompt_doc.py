"""A prompt in labelled pieces: the router's canonical text, field by field and message by message."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.routing.prompt_blocks import PROMPT_SHAPING_FIELDS, canonical_text

_BOUNDARY = re.compile(rb"(?=[\x1d\x1e])")
HEAD_ROLES = ("system", "developer")
"""Roles of messages that open every conversation of an app."""
_JSON_FIELDS = frozenset(PROMPT_SHAPING_FIELDS)


@dataclass(frozen=True, slots=True)
class Segment:
    """One field or message. The segments of a prompt, one after the other, are its canonical text."""

    place: str
    """``"tools"``, ``"message 0 (system)"``, ``"message 3 (assistant).tool_calls"``, ``"prompt"``."""
    role: str
    """Of a message; a field's name; ``"prompt"``."""
    text: bytes
    """As in the canonical text, with the mark and the label before it."""

    @property
    def label_bytes(self) -> int:
        """Bytes of the mark and the label, before the content."""
        return self.text.find(b"\x1f") + 1 if self.text[:1] in (b"\x1d", b"\x1e") else 0

    @property
    def content(self) -> bytes:
        """What the caller wrote."""
        return self.text[self.label_bytes :]

    def with_content(self, content: bytes) -> "Segment":
        """The same place with another content."""
        return Segment(self.place, self.role, self.text[: self.label_bytes] + content)

    @property
    def in_head(self) -> bool:
        """Before the conversation: a field, or a system message. A plain prompt is all head."""
        return self.role in HEAD_ROLES or self.role in _JSON_FIELDS or self.role == "prompt"


@dataclass(frozen=True, slots=True)
class PromptDoc:
    """One prompt, and the name space in which it may share blocks."""

    model: str
    salt: str
    segments: tuple[Segment, ...]
    gap: tuple[int, int] = (0, 0)
    """(start, bytes) of text that stands here but is not the request's own: it was dropped by the caller."""
    answer_bytes: float | None = None
    """How long the answer was, in text; ``None``: not told."""

    @property
    def name_space(self) -> bytes:
        """Model and salt: prompts share blocks only with those of the same."""
        model, salt = (part.encode("utf-8", "surrogatepass") for part in (self.model, self.salt))
        return b"%d:%s%d:%s" % (len(model), model, len(salt), salt)

    @property
    def text(self) -> bytes:
        """All segments."""
        return b"".join([segment.text for segment in self.segments])

    @property
    def own_bytes(self) -> int:
        """Length of the request's own text."""
        return sum(len(segment.text) for segment in self.segments) - self.gap[1]

    def own_prefix(self, prefix_bytes: int) -> int:
        """How much of the first ``prefix_bytes`` of ``text`` is the request's own."""
        start, dropped = self.gap
        return prefix_bytes - min(dropped, max(0, prefix_bytes - start))

    def place_of(self, offset: int) -> Segment | None:
        """The segment that byte ``offset`` is in; ``None`` past the end."""
        for segment in self.segments:
            if offset < len(segment.text):
                return segment
            offset -= len(segment.text)
        return None


def prompt_doc(body: Mapping[str, Any]) -> PromptDoc:
    """The prompt of an OpenAI request body.

    >>> doc = prompt_doc({"model": "m", "messages": [{"role": "system", "content": "Be kind."},
    ...                                              {"role": "user", "content": "Hi"}]})
    >>> [(one.place, one.content) for one in doc.segments]
    [('message 0 (system)', b'Be kind.'), ('message 1 (user)', b'Hi')]
    """
    request = dict(body)
    model, salt = body.get("model"), body.get("cache_salt")
    return PromptDoc(
        model if isinstance(model, str) else "",
        salt if isinstance(salt, str) else "",
        tuple(_segments(request)),
    )


def _segments(request: dict[str, Any]) -> list[Segment]:
    text = canonical_text(request)
    head_bytes = 0
    if not isinstance(request.get("messages"), list):
        fields = {name: request[name] for name in PROMPT_SHAPING_FIELDS if name in request}
        head_bytes = len(canonical_text(fields))
    head, rest = text[:head_bytes], text[head_bytes:]
    made: list[Segment] = []
    messages = 0
    last = ""
    for piece in (*_BOUNDARY.split(head), *_BOUNDARY.split(rest)):
        if not piece:
            continue
        label = piece[1 : piece.find(b"\x1f")].decode("utf-8", "replace") if b"\x1f" in piece else ""
        if piece[:1] == b"\x1e":
            last = f"message {messages} ({label or 'no role'})"
            messages += 1
            made.append(Segment(last, label, piece))
        elif piece[:1] == b"\x1d":
            made.append(Segment(f"{last}.{label}" if last else label, label, piece))
        else:
            made.append(Segment("prompt", "prompt", piece))
    return made
