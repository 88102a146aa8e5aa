"""The comparison for people: a table per load with intervals, and what each policy gains or loses."""

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from sim.compare import MEASURES, Cell, Comparison, Measure
from sim.estimates import Estimate


def print_comparison(comparison: Comparison, console: Console, load_unit: str) -> None:
    """One table per rate, or several one below another where the console is narrow."""
    reference = comparison.cells[0].policy
    for rate in dict.fromkeys(cell.rate for cell in comparison.cells):
        cells = [cell for cell in comparison.cells if cell.rate == rate]
        console.print(
            f"rate {rate:g}: {cells[0].load:.2f} {load_unit}, {len(comparison.seeds)} seeds, "
            f"95% intervals; small figures: against {reference}, seed by seed",
            soft_wrap=True,
        )
        for table in _tables(comparison, cells, MEASURES, console):
            console.print(table)


def _tables(
    comparison: Comparison, cells: list[Cell], measures: Sequence[Measure], console: Console
) -> Iterator[Table]:
    """``measures`` in as few tables as fit."""
    table = _table(comparison, cells, measures)
    free = console.options.update(max_width=1_000)
    half = (len(measures) + 1) // 2
    if len(measures) < 2 or Measurement.get(console, free, table).maximum <= console.width:
        yield table
        return
    yield from _tables(comparison, cells, measures[:half], console)
    yield from _tables(comparison, cells, measures[half:], console)


def _table(comparison: Comparison, cells: list[Cell], measures: Sequence[Measure]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy", no_wrap=True)
    for measure in measures:
        table.add_column(measure.label, justify="right", no_wrap=True)
    table.add_column("errors", justify="right", no_wrap=True)
    best = {measure.name: _best(cells, measure) for measure in measures}
    for cell in cells:
        row = [cell.policy]
        for measure in measures:
            text = _value(cell.estimate(measure), measure.digits)
            if cell.policy == best[measure.name]:
                text = f"[bold]{text}[/bold]"
            if cell is not cells[0]:
                text += f"\n[dim]{_change(comparison.against_reference(cell, measure), measure)}[/dim]"
            row.append(text)
        errors = sum(result.errors for result in cell.results)
        table.add_row(*row, f"{errors:,}")
    return table


def _best(cells: list[Cell], measure: Measure) -> str | None:
    known = {cell.policy: made.mean for cell in cells if (made := cell.estimate(measure)) is not None}
    if len(known) < 2:
        return None
    pick = min if measure.less_is_better else max
    return pick(known, key=lambda policy: known[policy])


def _value(made: Estimate | None, digits: int) -> str:
    if made is None:
        return "-"
    text = f"{made.mean:,.{digits}f}"
    return text if made.half_width is None else f"{text} ±{made.half_width:.{digits}f}"


def _change(made: Estimate | None, measure: Measure) -> str:
    if made is None:
        return "-"
    if measure.as_ratio:
        return _ratio(made)
    text = f"{made.mean:+.{measure.digits}f}"
    return text if made.half_width is None else f"{text} ±{made.half_width:.{measure.digits}f}"


def _ratio(made: Estimate) -> str:
    """A change as a share, or from twice on as a factor.

    >>> _ratio(Estimate(0.297, 0.671)), _ratio(Estimate(4.0, 5.5)), _ratio(Estimate(-0.012, None))
    ('+29.7% ±67%', '×5.0 ±5.5', '-1.2%')
    """
    if made.mean >= 1.0:
        text = f"×{1.0 + made.mean:.1f}"
        return text if made.half_width is None else f"{text} ±{made.half_width:.1f}"
    text = f"{made.mean:+.1%}"
    if made.half_width is None:
        return text
    digits = 1 if made.half_width < 0.1 else 0
    return f"{text} ±{made.half_width:.{digits}%}"
