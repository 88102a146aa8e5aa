"""Results for people: one table, one row per policy, best figures in bold."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from sim.results import CLIENT_LIMIT, LATE_LIMIT_S, Result

PLAIN_WIDTH = 140
"""Columns of output that is no terminal: wide enough for the whole table."""
ROUNDING = 0.0005
"""Shares are shown with three digits."""


@dataclass(frozen=True, slots=True)
class _Column:
    header: str
    value: Callable[[Result], float | None]
    digits: int
    best: Callable[[Sequence[float]], float] | None
    rank: int
    """On a narrow terminal the columns of highest rank are left out."""


_COLUMNS = (
    _Column("TTFT s\nmean", lambda result: result.ttft_s.mean, 2, min, 0),
    _Column("\np50", lambda result: result.ttft_s.p50, 2, min, 2),
    _Column("\np99", lambda result: result.ttft_s.p99, 2, min, 0),
    _Column("E2E s\nmean", lambda result: result.e2e_s.mean, 2, min, 0),
    _Column("\np99", lambda result: result.e2e_s.p99, 2, min, 4),
    _Column("TPOT ms\np50", lambda result: result.tpot_ms.p50, 1, min, 1),
    _Column("\np99", lambda result: result.tpot_ms.p99, 1, min, 4),
    _Column("cached\nshare", lambda result: result.cached_share, 3, max, 0),
    _Column("of\nideal", lambda result: _of_ideal(result), 3, max, 5),
    _Column("in\nSLO", lambda result: result.in_slo_share, 3, max, 0),
    _Column("TTFT in\nSLO", lambda result: result.ttft_in_slo_share, 3, max, 4),
    _Column("work\nmax/mean", lambda result: result.max_over_mean_work, 2, None, 3),
    _Column("\nspills", lambda result: None if result.spills is None else float(result.spills), 0, None, 1),
    _Column("\nerrors", lambda result: float(result.errors), 0, None, 0),
)


def results_table(results: Sequence[Result], console: Console, *, subject: str = "policy") -> Table:
    """A table of ``results`` that fits ``console``; a dash stands for what could not be measured.

    ``subject``: what the rows are.
    """
    table = Table()
    free = console.options.update(max_width=1_000)
    for most in range(max(column.rank for column in _COLUMNS), -1, -1):
        table = _table(results, [column for column in _COLUMNS if column.rank <= most], subject)
        if Measurement.get(console, free, table).maximum <= console.width:
            break
    return table


def client_warning(results: Sequence[Result]) -> str | None:
    """What to say of runs whose own sender was too busy."""
    busy = [
        f"{one.policy} {one.client_cpu_share or 0.0:.0%}, {1e3 * (one.send_lag_p99_s or 0.0):.0f} ms late"
        for one in results
        if one.client_limited
    ]
    if not busy:
        return None
    return (
        f"MARKED: the sender used over {CLIENT_LIMIT:.0%} of its core or sent over {1e3 * LATE_LIMIT_S:g} ms "
        f"late ({'; '.join(busy)}): these times may be its own. Ask less of it"
    )


def _table(results: Sequence[Result], columns: Sequence[_Column], subject: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column(f"\n{subject}", no_wrap=True)
    rows = [[result.policy] for result in results]
    for column in columns:
        table.add_column(column.header, justify="right", no_wrap=True)
        values = [column.value(result) for result in results]
        known = [value for value in values if value is not None]
        best = column.best(known) if column.best and len(known) > 1 else None
        for row, value in zip(rows, values, strict=True):
            text = "-" if value is None else f"{value:,.{column.digits}f}"
            row.append(f"[bold]{text}[/bold]" if value is not None and value == best else text)
    for row in rows:
        table.add_row(*row)
    return table


def table_console() -> Console:
    """Standard output as rich sees it; wide where it is a file or a pipe."""
    console = Console(highlight=False)
    return console if console.is_terminal else Console(width=PLAIN_WIDTH, highlight=False)


def print_whole(console: Console, table: Table) -> None:
    """Print ``table`` as wide as it is: one that a terminal breaks can be read, figures cut off cannot."""
    width = console.width
    free = console.options.update(max_width=1_000)
    console.width = max(width, Measurement.get(console, free, table).maximum)
    console.print(table)
    console.width = width


def above_ideal(result: Result) -> bool:
    """Servers told of more cached tokens than the trace itself shares: the ideal bounds them no more."""
    shares = result.cached_share, result.ideal_cached_share
    return shares[0] is not None and shares[1] is not None and shares[0] > shares[1] + ROUNDING


def _of_ideal(result: Result) -> float | None:
    if result.cached_share is None or not result.ideal_cached_share or above_ideal(result):
        return None
    return result.cached_share / result.ideal_cached_share
