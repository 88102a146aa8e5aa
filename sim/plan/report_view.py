"""A plan for people: tables on a terminal, one line per quantity elsewhere; the answer comes last."""

import math
from collections.abc import Iterator

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.plan.worksheet import Grid, Line, Note, Report, Section


def print_report(report: Report, console: Console) -> None:
    """The whole report on ``console``."""
    if not console.is_terminal:
        for line in plain_lines(report):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    console.print(Text(report.title, style="bold"))
    for section in report.sections:
        console.print()
        console.print(Text(section.title, style="bold cyan"))
        _print_section(section, console)
    console.print()
    for sentence in report.answer:
        console.print(Text(sentence, style="bold"))


def plain_lines(report: Report) -> Iterator[str]:
    """The report as text: ``name = formula = numbers = value unit   # what it is``."""
    yield report.title
    for section in report.sections:
        yield ""
        yield f"## {section.title}"
        before: str | None = None
        for entry in section.entries:
            if isinstance(entry, Line):
                yield f"{_equation(entry)} = {_with_unit(entry)}   # {_comment(entry, before)}"
                before = entry.source or before
            elif isinstance(entry, Note):
                yield entry.text
            else:
                yield from _plain_grid(entry)
    if report.answer:
        yield ""
        yield "## Answer"
        yield from report.answer


def shown(value: float) -> str:
    """A number for people: whole ones in full, others to four digits.

    >>> [shown(value) for value in (12600, 105.6, 0.0057704, 455160.4, 0.79091, 3e-9, float("inf"))]
    ['12,600', '105.6', '0.00577', '455,160', '0.7909', '3e-09', 'infinite']
    """
    if math.isinf(value):
        return "infinite"
    if value == int(value):
        return f"{int(value):,}"
    if abs(value) < 1e-4:
        return f"{value:.3g}"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:,.0f}"


def _with_unit(line: Line) -> str:
    unit = line.unit
    if line.value == 1 and unit.endswith("s") and unit.isalpha() and len(unit) > 2:
        unit = unit[:-1]  # 1 replica
    return f"{shown(line.value)} {unit}".rstrip()


def _equation(line: Line) -> str:
    if line.formula is None or line.numbers is None:
        return line.name
    if line.formula == line.numbers or line.formula.replace("_", "").isalnum():
        # Numbers alone, or one name: said again it is nothing new.
        return f"{line.name} = {line.formula}"
    return f"{line.name} = {line.formula} = {line.numbers}"


def _comment(line: Line, before: str | None) -> str:
    return line.says if line.source is None else f"{line.says} [{_source(line.source, before)}]"


def _source(source: str, before: str | None) -> str:
    return "same source" if source == before and len(source) > len("same source") else source


def _plain_grid(grid: Grid) -> Iterator[str]:
    if grid.title:
        yield f"{grid.title}:"
    table = [[_header(*column) for column in grid.columns]]
    table += [[_cell(cell) for cell in row] for row in grid.rows]
    widths = [max(len(row[place]) for row in table) for place in range(len(grid.columns))]
    for row in table:
        first, *others = (text.rjust(width) for text, width in zip(row, widths, strict=True))
        yield "  ".join([first.strip().ljust(widths[0]), *others]).rstrip()


def _header(title: str, unit: str) -> str:
    return f"{title} {unit}".strip() if not (title and unit) else f"{title}, {unit}"


def _cell(cell: str | Line) -> str:
    return cell if isinstance(cell, str) else shown(cell.value)


def _print_section(section: Section, console: Console) -> None:
    table: Table | None = None
    before: str | None = None
    for entry in section.entries:
        if isinstance(entry, Line):
            if table is None:
                table = Table(box=None, padding=(0, 1), pad_edge=False, show_header=False)
                table.add_column(ratio=2, overflow="fold")
                table.add_column(justify="right", no_wrap=True)
                table.add_column(ratio=3, overflow="fold")
            table.add_row(*_row(entry, before))
            before = entry.source or before
            continue
        if table is not None:
            console.print(table)
            table = None
        if isinstance(entry, Note):
            console.print(Text(entry.text, style="italic"))
        else:
            console.print(_grid(entry))
    if table is not None:
        console.print(table)


def _row(line: Line, before: str | None) -> tuple[Text, Text, Text]:
    how = Text(line.name)
    if line.formula is not None and line.numbers is not None:
        how.append(f" = {line.formula}")
        if not line.formula.replace("_", "").isalnum():
            how.append(f"\n= {line.numbers}", style="dim")
    elif line.source is not None:
        how.append(f"  {_source(line.source, before)}", style="dim")
    return Text(line.says), Text(_with_unit(line), style="bold"), how


def _grid(grid: Grid) -> Table:
    table = Table(title=grid.title or None, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, (title, unit) in enumerate(grid.columns):
        header = f"{title}\n{unit}".strip("\n") if unit else title
        table.add_column(header, justify="right" if place else "left", overflow="fold")
    for row in grid.rows:
        table.add_row(*(Text(_cell(cell)) for cell in row))
    return table
