"""A plan on paper: named quantities, each given with its source or computed by a formula that is kept.

A ``Worksheet`` is filled top down; a formula may use every name above it. ``done`` freezes it into a
``Report``, which is all that the printing and the JSON see.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sim.plan.formula import FormulaError, evaluate, filled, names_in


@dataclass(frozen=True, slots=True)
class Line:
    """One quantity."""

    name: str
    says: str
    value: float
    unit: str
    """Empty for a plain ratio."""
    formula: str | None
    """Arithmetic over names of earlier lines; ``None`` if the value is given or was searched for."""
    numbers: str | None
    """The formula with numbers in place of names."""
    source: str | None
    """Where a value without a formula comes from, or how it was found."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Lines of several scopes side by side; every cell is the name of a line, or text."""

    title: str
    columns: tuple[tuple[str, str], ...]
    """(header, unit)."""
    rows: tuple[tuple[str | Line, ...], ...]


@dataclass(frozen=True, slots=True)
class Note:
    """A sentence: a conclusion, a condition, or what a figure leaves out."""

    text: str


@dataclass(frozen=True, slots=True)
class Section:
    """One step of the argument."""

    title: str
    entries: tuple[Line | Grid | Note, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """A finished plan."""

    kind: str
    title: str
    sections: tuple[Section, ...]
    answer: tuple[str, ...]
    """The conclusion, a sentence each."""

    def lines(self) -> Iterator[Line]:
        """Every quantity, in order."""
        for section in self.sections:
            for entry in section.entries:
                if isinstance(entry, Line):
                    yield entry

    def value(self, name: str) -> float:
        """The quantity ``name``; raises KeyError."""
        for line in self.lines():
            if line.name == name:
                return line.value
        raise KeyError(name)

    def json_object(self) -> dict[str, Any]:
        """Everything, for programs: each quantity with unit and formula."""
        return {
            "kind": self.kind,
            "title": self.title,
            "answer": list(self.answer),
            "sections": [
                {"title": section.title, "entries": [_json(entry) for entry in section.entries]}
                for section in self.sections
            ],
        }


def _json(entry: Line | Grid | Note) -> dict[str, Any]:
    if isinstance(entry, Note):
        return {"note": entry.text}
    if isinstance(entry, Grid):
        return {
            "table": entry.title,
            "columns": [{"header": header, "unit": unit} for header, unit in entry.columns],
            "rows": [
                [{"name": cell.name, "value": cell.value} if isinstance(cell, Line) else cell for cell in row]
                for row in entry.rows
            ],
        }
    made: dict[str, Any] = {
        "name": entry.name,
        "says": entry.says,
        "value": entry.value if abs(entry.value) != float("inf") else None,
        "unit": entry.unit,
    }
    for key in ("formula", "numbers", "source"):
        if (text := getattr(entry, key)) is not None:
            made[key] = text
    return made


class Worksheet:
    """Filled by one plan's arithmetic, from top to bottom.

    >>> sheet = Worksheet("online", "example")
    >>> sheet.section("One request")
    >>> sheet.given("prompt", 3300, "tokens", "prompt", "plan")
    3300
    >>> sheet.given("shared", 2900, "tokens", "of it cached", "plan")
    2900
    >>> sheet.line("new", "prompt - shared", "tokens", "left to prefill")
    400
    >>> with sheet.scope("gpu"):
    ...     sheet.line("ms", "new * 32 / 1000", "ms", "prefill")
    12.8
    >>> [(line.name, line.formula, line.numbers) for line in sheet.done().lines()][-1]
    ('gpu_ms', 'new * 32 / 1000', '400 * 32 / 1000')
    """

    def __init__(self, kind: str, title: str) -> None:
        self._kind = kind
        self._title = title
        self._values: dict[str, float] = {}
        self._lines: dict[str, Line] = {}
        self._sections: list[tuple[str, list[Line | Grid | Note]]] = []
        self._answer: list[str] = []
        self._scope: str | None = None

    def section(self, title: str) -> None:
        """Begin the next step."""
        self._sections.append((title, []))

    @contextmanager
    def scope(self, name: str) -> Iterator[None]:
        """Quantities made inside get ``name_`` before their names; formulas inside find those first."""
        outer, self._scope = self._scope, identifier(name)
        try:
            yield
        finally:
            self._scope = outer

    def given(self, name: str, value: float, unit: str, says: str, source: str) -> float:
        """A quantity from outside, with where it comes from."""
        return self._put(Line(self._full(name), says, value, unit, None, None, source))

    def line(self, name: str, formula: str, unit: str, says: str) -> float:
        """A quantity computed from those above."""
        used = {one: self._resolve(one) for one in names_in(formula)}
        expanded = re.sub(r"\b[A-Za-z_]\w*", lambda word: used.get(word.group(), word.group()), formula)
        value = evaluate(expanded, self._values)
        return self._put(
            Line(self._full(name), says, value, unit, expanded, filled(expanded, self._values), None)
        )

    def found(self, name: str, value: float, unit: str, says: str, how: str) -> float:
        """A quantity searched for; ``how`` names the condition it meets."""
        return self._put(Line(self._full(name), says, value, unit, None, None, how))

    def note(self, text: str) -> None:
        """A sentence between the lines."""
        self._entries().append(Note(text))

    def conclude(self, text: str) -> None:
        """A sentence of the answer."""
        self._answer.append(text)

    def grid(
        self, title: str, columns: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]], labels: int = 1
    ) -> None:
        """Quantities already computed, side by side. The first ``labels`` cells of a row are text, the
        others names of quantities; an empty cell stays empty.
        """
        made = tuple(
            tuple(cell if place < labels or not cell else self._lines[cell] for place, cell in enumerate(row))
            for row in rows
        )
        self._entries().append(Grid(title, tuple(columns), made))

    def __getitem__(self, name: str) -> float:
        return self._values[self._resolve(name)]

    def done(self) -> Report:
        """The finished report."""
        return Report(
            self._kind,
            self._title,
            tuple(Section(title, tuple(entries)) for title, entries in self._sections),
            tuple(self._answer),
        )

    def _entries(self) -> list[Line | Grid | Note]:
        return self._sections[-1][1]

    def _full(self, name: str) -> str:
        return f"{self._scope}_{name}" if self._scope else name

    def _resolve(self, name: str) -> str:
        full = self._full(name)
        return full if full in self._values else name

    def _put(self, line: Line) -> float:
        if line.name in self._values:
            raise FormulaError(f"{line.name!r} has a value already")
        self._values[line.name] = line.value
        self._lines[line.name] = line
        self._entries().append(line)
        return line.value


def identifier(text: str) -> str:
    """``text`` as part of a quantity's name.

    >>> identifier("NVMe (local)"), identifier("8k")
    ('nvme_local', 'n8k')
    """
    made = re.sub(r"\W+", "_", text.lower()).strip("_")
    return made if made[:1].isalpha() else f"n{made}"
