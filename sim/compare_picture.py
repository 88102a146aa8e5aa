"""A comparison as a picture: load against TTFT, time to the last token and goodput, with intervals.

Needs matplotlib, which is the optional extra ``plot``: ``pip install "warmroute[plot]"``.
"""

from pathlib import Path
from typing import Any

from sim.compare import MEASURES, Cell, Comparison
from sim.estimates import Estimate, estimate

TTFT, E2E, IN_SLO = MEASURES[0], MEASURES[2], MEASURES[4]
SUFFIXES = (".png", ".svg")
"""Of what is written."""


class NoMatplotlib(Exception):
    """Matplotlib is not installed; the message says how to get it."""

    def __init__(self) -> None:
        super().__init__('the picture needs matplotlib; install it with: pip install "warmroute[plot]"')


def require_matplotlib() -> None:
    """Raise ``NoMatplotlib`` now rather than after a long run."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise NoMatplotlib from error


def write_picture(comparison: Comparison, path: str | Path, load_unit: str, title: str) -> list[Path]:
    """Write ``path`` as PNG and as SVG, whatever its suffix; returns both paths. Raises ``NoMatplotlib``."""
    require_matplotlib()
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    matplotlib.rcParams["svg.hashsalt"] = "warmroute"  # the same bytes every time
    figure, axes = pyplot.subplots(1, 3, figsize=(13.5, 4.2), constrained_layout=True)
    try:
        policies = list(dict.fromkeys(cell.policy for cell in comparison.cells))
        for place, policy in enumerate(policies):
            cells = sorted((c for c in comparison.cells if c.policy == policy), key=lambda c: c.load)
            for axis, points in (
                (axes[0], [cell.estimate(TTFT) for cell in cells]),
                (axes[1], [cell.estimate(E2E) for cell in cells]),
                (axes[2], [_goodput(cell) for cell in cells]),
            ):
                _line(axis, cells, points, policy, place)
        for axis, label in zip(
            axes,
            ("mean time to first token, s", "mean time to last token, s", "in SLO, per second"),
            strict=True,
        ):
            axis.set_xlabel(load_unit)
            axis.set_ylabel(label)
            axis.grid(alpha=0.3)
        axes[0].set_yscale("log")
        axes[1].set_yscale("log")
        axes[2].set_ylim(bottom=0.0)
        axes[0].legend(fontsize="small")
        figure.suptitle(title, fontsize="medium")
        return [_save(figure, Path(path).with_suffix(suffix)) for suffix in SUFFIXES]
    finally:
        pyplot.close(figure)


def _save(figure: Any, path: Path) -> Path:
    figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else {"Software": None})
    return path


def _goodput(cell: Cell) -> Estimate | None:
    """Load times the share in SLO."""
    shares = cell.values(IN_SLO)
    return None if shares is None else estimate([cell.load * share for share in shares])


def _line(axis: Any, cells: list[Cell], points: list[Estimate | None], policy: str, place: int) -> None:
    known = [(cell.load, point) for cell, point in zip(cells, points, strict=True) if point is not None]
    loads = [load for load, _ in known]
    means = [point.mean for _, point in known]
    widths = [point.half_width or 0.0 for _, point in known]
    (line,) = axis.plot(loads, means, marker="osD^vP*X"[place % 8], markersize=4, label=policy)
    lower = [max(mean - width, mean * 0.05) for mean, width in zip(means, widths, strict=True)]
    upper = [mean + width for mean, width in zip(means, widths, strict=True)]
    axis.fill_between(loads, lower, upper, alpha=0.15, color=line.get_color())
