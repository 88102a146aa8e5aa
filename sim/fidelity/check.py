"""Fit on one measured run, check on another: how far the simulator may be believed."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from replica.contract.roofline.roofline import Efficiency
from sim.fidelity.comparison import Figure, compare
from sim.fidelity.fit import fit_efficiency, simulated
from sim.fidelity.measured_run import MeasuredRun, MeasuredRunError, read_measured_run

FIRST_SHARE = 0.5
"""Of a run's requests, those that a fit within one run may see."""


@dataclass(frozen=True, slots=True)
class Check:
    """One row: where the efficiencies came from, which run they were tried on, how that came out."""

    fitted_on: str
    checked_on: str
    efficiency: Efficiency
    figures: tuple[Figure, ...]


def read_measured_runs(folder: str | Path) -> list[MeasuredRun]:
    """The runs in ``folder``, by name: its folders with a ``meta.json``. Raises MeasuredRunError."""
    folder = Path(folder)
    found = sorted(path.parent for path in folder.glob("*/meta.json"))
    if not found:
        raise MeasuredRunError(
            f"{folder}: no measured run; expected folders with meta.json and requests.jsonl"
        )
    return [read_measured_run(path) for path in found]


def checks(
    runs: Sequence[MeasuredRun], progress: Callable[[str], None] = lambda what: None
) -> Iterator[Check]:
    """Defaults on every run; each run's fit on every run; and on the second half, a fit to the first half."""
    for run in runs:
        yield _check("defaults", Efficiency(), run)
    for source in runs:
        progress(f"fitting {source.name}")
        efficiency = fit_efficiency([source])
        for run in runs:
            yield _check(source.name, efficiency, run)
    for run in runs:
        progress(f"fitting the first half of {run.name}")
        efficiency = fit_efficiency([run], first_share=FIRST_SHARE)
        yield _check(f"first half of {run.name}", efficiency, run, from_share=FIRST_SHARE)


def _check(fitted_on: str, efficiency: Efficiency, run: MeasuredRun, from_share: float = 0.0) -> Check:
    first = int(len(run.outcomes) * from_share)
    figures = compare(run.outcomes[first:], simulated(run, efficiency)[first:])
    name = run.name if not first else f"second half of {run.name}"
    return Check(fitted_on, name, efficiency, figures)
