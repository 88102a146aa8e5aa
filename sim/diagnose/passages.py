"""Passages of retrieved text: which paragraphs come again in another order, and prompts with them sorted."""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import orjson

from sim.diagnose.account import Cause
from sim.diagnose.prompt_doc import PromptDoc, Segment

PASSAGE_BYTES = 48
"""Shorter paragraphs are no passages."""
MOST_PASSAGES = 24
"""Of one message, compared for their order."""
IN_NEARLY_ALL = 0.9
"""A paragraph in so many of the messages is part of the frame, not a passage."""

_NUMBERING = re.compile(rb"(?i)\W*(?:(?:passage|document|doc|source|context|chunk)\W*)?\d{1,3}[\]).:]*\s*")
"""``[1] ``, ``Document 2: ``: belongs to the place, not to the passage."""


@dataclass(frozen=True, slots=True)
class SortedPassages:
    """Passages that come again stand in one order, in the places where such stood."""

    role: str
    passages: frozenset[bytes]

    cause = Cause.PASSAGES

    def apply(self, docs: Sequence[PromptDoc]) -> list[PromptDoc]:
        """Other paragraphs stay where they are, and so do numbers before passages."""
        return [
            replace(doc, segments=tuple(self._sorted(segment) for segment in doc.segments)) for doc in docs
        ]

    def _sorted(self, segment: Segment) -> Segment:
        if segment.role != self.role:
            return segment
        parts = _paragraphs(segment)
        places = [place for place, (_, passage) in enumerate(parts) if passage in self.passages]
        if len(places) < 2:
            return segment
        for place, passage in zip(places, sorted(parts[place][1] for place in places), strict=True):
            parts[place] = (parts[place][0], passage)
        made = _separator(segment).join(number + passage for number, passage in parts)
        return segment.with_content(b"[" + made + b"]" if segment.role == "documents" else made)


def reordered(docs: Sequence[PromptDoc]) -> Iterator[SortedPassages]:
    """For each role in whose messages two passages were seen both ways round: the edit that sorts them."""
    by_role: dict[str, dict[bytes, list[bytes]]] = {}
    for doc in docs:
        for segment in doc.segments:
            messages = by_role.setdefault(segment.role, {})
            if segment.text not in messages:  # a conversation repeats its messages turn after turn
                found = [passage for _, passage in _paragraphs(segment) if len(passage) >= PASSAGE_BYTES]
                messages[segment.text] = list(dict.fromkeys(found))
    for role, messages in by_role.items():
        counts = Counter(passage for found in messages.values() for passage in found)
        lists = [[one for one in found if counts[one] > 1] for found in messages.values()]
        moving = _moving(lists)
        concerned = [found for found in lists if not moving.isdisjoint(found)]
        often = Counter(passage for found in concerned for passage in found)
        passages = frozenset(
            one for one, count in often.items() if one in moving or count < IN_NEARLY_ALL * len(concerned)
        )
        if moving:
            yield SortedPassages(role, passages)


def _moving(lists: Sequence[Sequence[bytes]]) -> set[bytes]:
    """Passages that stand before another here and after it there."""
    before: set[tuple[bytes, bytes]] = set()
    moving: set[bytes] = set()
    for found in lists:
        for pair in combinations(found[:MOST_PASSAGES], 2):
            before.add(pair)
            if (pair[1], pair[0]) in before:
                moving.update(pair)
    return moving


def _paragraphs(segment: Segment) -> list[tuple[bytes, bytes]]:
    """(numbering, text) of the paragraphs of a message, or of the entries of a field of documents.

    >>> _paragraphs(Segment("message 0 (user)", "user", b"\\x1euser\\x1f[1] one\\n\\n[2] two\\n\\nwhy?"))
    [(b'[1] ', b'one'), (b'[2] ', b'two'), (b'', b'why?')]
    """
    content = segment.content
    if segment.role == "documents":
        try:
            value = orjson.loads(content)
        except orjson.JSONDecodeError:
            value = None
        items = [orjson.dumps(item) for item in value] if isinstance(value, list) else [content]
        return [(b"", item) for item in items]
    made = []
    for paragraph in content.split(_separator(segment)):
        match = _NUMBERING.match(paragraph)
        cut = match.end() if match else 0
        made.append((paragraph[:cut], paragraph[cut:]))
    return made


def _separator(segment: Segment) -> bytes:
    if segment.role == "documents":
        return b","
    return b"\n\n" if segment.content.count(b"\n\n") >= 2 else b"\n"
