"""A report for people: tables on a terminal, plain aligned text elsewhere, or one HTML file with bars."""

from collections.abc import Iterator
from html import escape

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from sim.diagnose.report import DiagnosisReport, ReportTable

BAR_PIXELS = 260


def print_report(report: DiagnosisReport, console: Console) -> None:
    """The whole report on ``console``."""
    if not console.is_terminal:
        for line in plain_lines(report):
            console.print(line, markup=False, highlight=False, soft_wrap=True)
        return
    console.print(Text(report.title, style="dim"))
    for sentence in report.verdict:
        console.print(Text(sentence, style="bold"))
    for table in report.tables[:2]:
        console.print(_rich(table))
    for headline, lines in report.findings:
        console.print(Text(headline, style="bold yellow"))
        for line in lines:
            console.print(Text(f"  {line}"))
        console.print()
    for table in report.tables[2:]:
        console.print(_rich(table))


def _rich(table: ReportTable) -> Table:
    made = Table(title=table.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for place, column in enumerate(table.columns):
        made.add_column(column, justify="right" if _numeric(table, place) else "left", overflow="fold")
    for row in table.rows:
        made.add_row(*(Text(cell) for cell in row))
    return made


def _numeric(table: ReportTable, place: int) -> bool:
    """Whether a column holds figures only."""
    cells = [row[place] for row in table.rows if row[place]]
    return place > 0 and all(cell.strip("-+%").replace(",", "").replace(".", "").isdigit() for cell in cells)


def plain_lines(report: DiagnosisReport) -> Iterator[str]:
    """The report as text."""
    yield report.title
    yield from report.verdict
    for table in report.tables[:2]:
        yield from _plain(table)
    if report.findings:
        yield ""
        yield "## Findings"
    for number, (headline, lines) in enumerate(report.findings, 1):
        yield f"{number}. {headline}"
        for line in lines:
            yield f"   {line}"
    for table in report.tables[2:]:
        yield from _plain(table)


def _plain(table: ReportTable) -> Iterator[str]:
    yield ""
    yield f"## {table.title}"
    grid = [table.columns, *table.rows]
    widths = [max(len(row[place]) for row in grid) for place in range(len(table.columns))]
    right = [_numeric(table, place) for place in range(len(table.columns))]
    for row in grid:
        cells = [
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(row, widths, right, strict=True)
        ]
        yield "  ".join(cells).rstrip()


def html_page(report: DiagnosisReport) -> str:
    """One file, nothing loaded from elsewhere; what prompts contain is escaped."""
    parts = [f"<h1>Why is the hit rate what it is</h1><p>{escape(report.title)}</p>"]
    parts += [f"<p><b>{escape(sentence)}</b></p>" for sentence in report.verdict]
    parts += [_html_table(table) for table in report.tables[:2]]
    if report.findings:
        parts.append("<h2>Findings</h2>")
    for headline, lines in report.findings:
        text = escape("\n".join(lines))
        parts.append(f"<details open><summary>{escape(headline)}</summary><pre>{text}</pre></details>")
    parts += [_html_table(table) for table in report.tables[2:]]
    return _PAGE.replace("BODY", "\n".join(parts))


def _html_table(table: ReportTable) -> str:
    header = "".join(f"<th>{escape(column)}</th>" for column in table.columns)
    rows = []
    for place, row in enumerate(table.rows):
        shades = _shades(row) if table.heat else [""] * len(row)
        cells = "".join(
            f"<td class={'n' if _numeric(table, column) else 't'}{shade}>{escape(cell)}</td>"
            for column, (cell, shade) in enumerate(zip(row, shades, strict=True))
        )
        if table.bars:
            width = round(BAR_PIXELS * min(1.0, table.bars[place]))
            cells += (
                f'<td><svg width="{BAR_PIXELS}" height="14"><rect width="{width}" height="14"/></svg></td>'
            )
        rows.append(f"<tr>{cells}</tr>")
    bar_header = "<th></th>" if table.bars else ""
    return f"<h2>{escape(table.title)}</h2><table><tr>{header}{bar_header}</tr>" + "".join(rows) + "</table>"


def _shades(row: tuple[str, ...]) -> list[str]:
    """The style of each cell: the darker, the larger its share of the row's figures."""
    figures = [int(cell.replace(",", "")) if cell.replace(",", "").isdigit() else 0 for cell in row]
    total = sum(figures) or 1
    return [
        f' style="background: rgba(34, 170, 119, {figure / total:.2f})"' if figure else ""
        for figure in figures
    ]


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>warmroute diagnose</title><style>
body { font: 14px/1.45 system-ui, sans-serif; margin: 2em auto; max-width: 1200px; color: #222 }
table { border-collapse: collapse } td, th { padding: 2px 10px 2px 0; text-align: left; vertical-align: top }
td.n { text-align: right; font-variant-numeric: tabular-nums } rect { fill: #2a7 }
pre { white-space: pre-wrap; background: #f6f6f6; padding: .6em }
summary { font-weight: 600; cursor: pointer }
</style></head><body>
BODY
</body></html>
"""
