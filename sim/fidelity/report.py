"""The fidelity table: per check, each figure measured, simulated and how far apart they are."""

from collections.abc import Iterable
from importlib.resources import as_file, files
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from sim.fidelity.check import Check, checks, read_measured_runs
from sim.fidelity.comparison import Figure
from sim.fidelity.expert_kernels import (
    GPU,
    MODEL,
    expert_kernels,
    expert_kernels_table,
    mean_error,
)
from sim.progress_view import ProgressView


def print_fidelity(folder: str | None, console: Console) -> None:
    """Check the runs in ``folder`` (default: those that come with the package). Raises MeasuredRunError."""
    if folder is None:
        with as_file(files("sim.fidelity") / "data") as shipped:
            _print(shipped, console)
        kernels = expert_kernels()
        console.print(
            f"One layer of {MODEL}'s experts on {GPU}, kernels alone; off by "
            f"{mean_error(kernels):.0%} in the mean:"
        )
        console.print(expert_kernels_table(kernels))
    else:
        _print(Path(folder), console)


def _print(folder: Path, console: Console) -> None:
    runs = read_measured_runs(folder)
    with ProgressView() as view:
        done = list(checks(runs, lambda what: view.update(what, 1, 1)))
    console.print(fidelity_table(done))
    for check in {check.fitted_on: check for check in done}.values():
        console.print(f"{check.fitted_on}: {check.efficiency}", soft_wrap=True, highlight=False)


def _pair(figure: Figure) -> str:
    if figure.measured_s < 1.0:
        return f"{1e3 * figure.measured_s:.1f} → {1e3 * figure.simulated_s:.1f} ms"
    return f"{figure.measured_s:.2f} → {figure.simulated_s:.2f} s"


def fidelity_table(done: Iterable[Check]) -> Table:
    """Errors in percent, positive where the simulation is slower; those beyond what is allowed are marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("fitted on", overflow="fold")
    table.add_column("checked on", overflow="fold")
    header = True
    for check in done:
        if header:
            for figure in check.figures:
                table.add_column(f"{figure.name}\n(within {figure.allowed:.0%})", justify="right")
            header = False
        cells = [
            f"{_pair(figure)}\n{figure.error:+.1%}" + ("" if figure.within else " !")
            for figure in check.figures
        ]
        table.add_row(check.fitted_on, check.checked_on, *cells)
    return table
