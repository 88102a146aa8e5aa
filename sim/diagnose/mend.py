"""Finds what callers can mend in their prompts, one thing after the other, and what each wins."""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from sim.diagnose.edits import (
    CHANGING,
    ChangingLine,
    ChangingLineLast,
    ChangingLines,
    ChangingValuesLast,
    Edit,
    OneModel,
    OneSalt,
    SortedTools,
    Untrimmed,
    form_of,
    sentences,
)
from sim.diagnose.passages import reordered
from sim.diagnose.prompt_doc import PromptDoc, Segment
from sim.diagnose.reach import Reach, reaches
from sim.simulate import Progress

LEAST_SHARE = 0.002
"""Of all prompt bytes: an edit that wins less is not worth a change."""
MOST_TRIALS = 16
"""Changing lines tried; each costs one pass over all prompts."""
MOST_TOGETHER = 4
"""Changing lines, one behind the other, that are moved together."""
MOST_PASSES = MOST_TRIALS + 8
"""About as many over all prompts, for the progress shown."""
JOB = "prompts, mended"
MOST_VALUES = 8
"""In one line: a line of numbers is data, not a line with a date in it."""


@dataclass(frozen=True, slots=True)
class Mended:
    """One edit that was worth it."""

    edit: Edit
    before: tuple[Reach, ...]
    after: tuple[Reach, ...]
    docs: tuple[PromptDoc, ...]
    """The prompts before the edit."""


def mended(
    docs: Sequence[PromptDoc], counted: Sequence[bool], progress: Progress | None = None
) -> Iterator[Mended]:
    """Edits worth making, each on top of those before; ``docs`` are in order of arrival.

    Gains are those of the ``counted`` requests.
    """
    bench = _Bench(docs, counted, progress or (lambda job, done, total: None))
    for edit in (OneSalt(), OneModel(), SortedTools()):
        yield from bench.trial(edit)
    yield from _changing_text(bench)
    for passages in reordered(bench.docs):
        yield from bench.trial(passages)
    yield from bench.trial(Untrimmed())
    bench.finished()


class _Bench:
    """The prompts as mended so far."""

    def __init__(self, docs: Sequence[PromptDoc], counted: Sequence[bool], progress: Progress) -> None:
        self._progress = progress
        self._passes = 0
        self.docs = list(docs)
        self.reach = self.reaches(docs)
        self.counted = counted
        total = sum(doc.own_bytes for doc, counts in zip(docs, counted, strict=True) if counts)
        self.least_bytes = max(1, round(LEAST_SHARE * total))

    def reaches(self, docs: Sequence[PromptDoc]) -> list[Reach]:
        """One pass over all prompts."""
        self._passes = min(self._passes + 1, MOST_PASSES - 1)
        self._progress(JOB, self._passes * len(docs) // MOST_PASSES, len(docs))
        return reaches(docs)

    def finished(self) -> None:
        """No more passes."""
        self._progress(JOB, len(self.docs), len(self.docs))

    def trial(self, edit: Edit) -> Iterator[Mended]:
        """Keep ``edit`` if it wins enough."""
        docs = edit.apply(self.docs)
        if all(one is other or one == other for one, other in zip(docs, self.docs, strict=True)):
            return
        after = self.reaches(docs)
        if self.wins_enough(after):
            yield self.keep(edit, docs, after)

    def wins_enough(self, after: Sequence[Reach]) -> bool:
        """Whether prompts that reach so far are worth the change."""
        return self._total(after) - self._total(self.reach) >= self.least_bytes

    def keep(self, edit: Edit, docs: list[PromptDoc], after: list[Reach]) -> Mended:
        """From now on prompts are ``docs``."""
        made = Mended(edit, tuple(self.reach), tuple(after), tuple(self.docs))
        self.docs, self.reach = docs, after
        return made

    def _total(self, reach: Sequence[Reach]) -> int:
        return sum(one.own_bytes for one, counts in zip(reach, self.counted, strict=True) if counts)


def _changing_text(bench: _Bench) -> Iterator[Mended]:
    """The line that stops most is tried first; what stands behind it shows only then, so lines that win
    nothing alone are tried together with those behind them."""
    hopeless: set[ChangingLine] = set()
    trials = 0
    while trials < MOST_TRIALS:
        docs, reach = bench.docs, bench.reach
        chain: list[ChangingLine] = []
        won = False
        while not won and len(chain) < MOST_TOGETHER:
            worst = _worst(docs, reach, hopeless.union(chain), bench.least_bytes)
            if worst is None:
                break
            trials += 1
            chain.append(worst)
            docs = worst.apply(docs)
            reach = bench.reaches(docs)
            won = bench.wins_enough(reach)
        if not chain:
            return
        if won:
            yield bench.keep(ChangingLines(tuple(chain)), docs, reach)
        else:
            hopeless.add(chain[0])


def _worst(
    docs: Sequence[PromptDoc], reach: Sequence[Reach], without: AbstractSet[ChangingLine], least_bytes: int
) -> ChangingLine | None:
    """The line behind which most bytes are not matched."""
    stopped: dict[ChangingLine, int] = {}
    for doc, one in zip(docs, reach, strict=True):
        edit = None if one.earlier is None else _suspect(doc, docs[one.earlier], one.at)
        if edit is not None and edit not in without:
            stopped[edit] = stopped.get(edit, 0) + doc.own_bytes - one.own_bytes
    worst = max(stopped, key=lambda edit: stopped[edit], default=None)
    return worst if worst is not None and stopped[worst] >= least_bytes else None


def _suspect(doc: PromptDoc, earlier: PromptDoc, at: int) -> ChangingValuesLast | ChangingLineLast | None:
    """The edit for the line in which two prompts part at byte ``at``, if it looks like one that changes."""
    here, there = _line_at(doc, at), _line_at(earlier, at)
    if here is None or there is None:
        return None
    (segment, lines, place), (other, other_lines, other_place) = here, there
    if segment.role != other.role or place != other_place or segment.role == "end":
        return None
    line, other_line = lines[place], other_lines[place]
    if form_of(line) == form_of(other_line) and 0 < len(CHANGING.findall(line)) <= MOST_VALUES:
        return ChangingValuesLast(segment.role, form_of(line))
    if segment.in_head and place + 1 < min(len(lines), len(other_lines)):
        after = lines[place + 1]
        if after.strip() and after == other_lines[place + 1]:
            return ChangingLineLast(segment.role, lines[place - 1] if place else b"", after)
    return None


def _line_at(doc: PromptDoc, at: int) -> tuple[Segment, tuple[bytes, ...], int] | None:
    """(segment, its lines, number of the line) of byte ``at``."""
    for segment in doc.segments:
        if at < len(segment.text):
            lines = sentences(segment.content)
            left = at - segment.label_bytes
            if left < 0:
                return None
            for place, line in enumerate(lines):
                if left < len(line):
                    return segment, lines, place
                left -= len(line)
            return None
        at -= len(segment.text)
    return None
