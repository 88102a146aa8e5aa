"""Prompts as they would be if their callers mended one thing. What that wins is found by replay, not guessed.

Every edit keeps a prompt's length: what it moves or sorts stays in the prompt.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Protocol

import orjson

from sim.diagnose.account import Cause
from sim.diagnose.prompt_doc import PromptDoc, Segment

CHANGING = re.compile(
    rb"\d{4}-\d\d-\d\d(?:[T ]\d\d:\d\d(?::\d\d(?:[.,]\d+)?)?)?(?:Z|[+-]\d\d:?\d\d)?"
    rb"|\b[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b"
    rb"|\b\d{1,2}:\d\d(?::\d\d)?(?:\s?[AaPp]\.?[Mm]\b)?"
    rb"|\b(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
    rb"|\b(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?"
    rb"|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b(?=[ .,]*\d)"
    rb"|\b(?=[0-9a-fA-F]*\d)[0-9a-fA-F]{8,}\b"
    rb"|\d+(?:[.,]\d+)*"
)
"""Dates, times, days, months, UUIDs, random ids, numbers: what templates put into prompts."""
MESSAGES_REMEMBERED = 8_192
"""Conversations repeat their messages turn after turn."""
_SENTENCES = re.compile(rb"(?<=\n)|(?<=[.!?;] )")


class Edit(Protocol):
    """One thing mended in all prompts."""

    cause: Cause

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """The prompts as they would be."""


@dataclass(frozen=True, slots=True)
class OneSalt:
    """Nobody gives a ``cache_salt``."""

    cause = Cause.SALT

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """Only the name space changes."""
        return [replace(doc, salt="") for doc in docs]


@dataclass(frozen=True, slots=True)
class OneModel:
    """All prompts go to one model."""

    cause = Cause.MODEL

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """Only the name space changes."""
        return [replace(doc, model="") for doc in docs]


@dataclass(frozen=True, slots=True)
class SortedTools:
    """Fields that are JSON are written one way: keys in order, tools by name."""

    cause = Cause.TOOLS

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """What is no JSON stays as it is."""
        return [
            replace(doc, segments=tuple(_written_one_way(segment) for segment in doc.segments))
            for doc in docs
        ]


def _written_one_way(segment: Segment) -> Segment:
    if segment.role not in ("tools", "functions", "response_format", "chat_template_kwargs"):
        return segment
    try:
        value = orjson.loads(segment.content)
    except orjson.JSONDecodeError:
        return segment
    written = orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
    if isinstance(value, list):
        items = sorted(orjson.dumps(item, option=orjson.OPT_SORT_KEYS) for item in value)
        written = b"[" + b",".join(items) + b"]"
    return segment.with_content(written) if len(written) == len(segment.content) else segment


@dataclass(frozen=True, slots=True)
class ChangingValuesLast:
    """In lines of one form, what changes goes to the end of the prompt."""

    role: str
    form: bytes
    """The line with ``CHANGING`` values replaced by ``#``."""

    cause = Cause.CHANGING_TEXT

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """The values of every such line are cut out and stand last."""
        return [_moved(doc, self.role, self._split) for doc in docs]

    def _split(self, lines: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        begin = self.form.partition(b"#")[0]
        kept: list[bytes] = []
        moved: list[bytes] = []
        for line in lines:
            if line.startswith(begin) and form_of(line) == self.form:
                moved += CHANGING.findall(line)
                line = CHANGING.sub(b"", line)
            kept.append(line)
        return kept, moved


@dataclass(frozen=True, slots=True)
class ChangingLineLast:
    """The line between two fixed ones goes to the end of the prompt."""

    role: str
    before: bytes
    after: bytes

    cause = Cause.CHANGING_TEXT

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """Every line that stands so is moved."""
        return [_moved(doc, self.role, self._split) for doc in docs]

    def _split(self, lines: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
        kept: list[bytes] = []
        moved: list[bytes] = []
        for place, line in enumerate(lines):
            around = (lines[place - 1] if place else b"", lines[place + 1] if place + 1 < len(lines) else b"")
            (moved if around == (self.before, self.after) else kept).append(line)
        return kept, moved


ChangingLine = ChangingValuesLast | ChangingLineLast


@dataclass(frozen=True, slots=True)
class ChangingLines:
    """Several such lines, one behind the other."""

    lines: tuple[ChangingLine, ...]

    cause = Cause.CHANGING_TEXT

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """All are moved."""
        made = list(docs)
        for line in self.lines:
            made = line.apply(made)
        return made


class _Split(Protocol):
    def __call__(self, lines: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]: ...


def _moved(doc: PromptDoc, role: str, split: _Split) -> PromptDoc:
    segments: list[Segment] = []
    last: list[bytes] = []
    for segment in doc.segments:
        if segment.role == role:
            kept, moved = split(sentences(segment.content))
            if moved:
                last += moved
                segment = segment.with_content(b"".join(kept))
        segments.append(segment)
    if not last:
        return doc
    return replace(doc, segments=(*segments, Segment("end", "end", b"".join(last))))


@lru_cache(maxsize=MESSAGES_REMEMBERED)
def sentences(content: bytes) -> tuple[bytes, ...]:
    """Lines, and sentences within a line, with what ends them.

    >>> sentences(b"You are kind. It is noon.\\nAnswer.")
    (b'You are kind. ', b'It is noon.\\n', b'Answer.')
    """
    return tuple(_SENTENCES.split(content))


def form_of(line: bytes) -> bytes:
    """The line with everything that may change replaced.

    >>> form_of(b"Today is Sunday, 2026-11-29 12:00, request 4711.")
    b'Today is #, #, request #.'
    """
    return CHANGING.sub(b"#", line)


@dataclass(frozen=True, slots=True)
class Untrimmed:
    """Conversations keep their oldest messages: what was dropped stands in a prompt, but is not its own."""

    cause = Cause.TRIMMED

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """Two messages in a row that an earlier prompt had further down tell that something was dropped."""
        seen: dict[tuple[bytes, bytes], tuple[tuple[Segment, ...], int]] = {}
        made = []
        for doc in docs:
            head = tuple(segment for segment in doc.segments if segment.in_head)
            body = tuple(segment for segment in doc.segments if not segment.in_head)
            dropped: tuple[Segment, ...] = ()
            if len(body) > 1:
                earlier, place = seen.get((body[0].text, body[1].text), ((), 0))
                dropped = earlier[:place]
            whole = dropped + body
            for place in range(len(whole) - 1):
                seen[whole[place].text, whole[place + 1].text] = (whole, place)
            if dropped:
                start = sum(len(segment.text) for segment in head)
                gap = (start, sum(len(segment.text) for segment in dropped))
                doc = replace(doc, segments=head + whole, gap=gap)
            made.append(doc)
        return made
