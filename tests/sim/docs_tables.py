"""The tables of simulated figures in README.md and docs/routing.md: run again, and compared or written anew.

``python -m tests.sim.docs_tables FOLDER`` runs the command of every row (minutes) on the traces in FOLDER
(``mooncake_conversation.jsonl`` of Mooncake's repository, ``tau_bench_airline_block16.jsonl.gz``) and prints
the rows that come out otherwise; with ``--write`` it puts them right. The test suite checks that every
command is one that ``simulate`` takes.
"""

import argparse
import contextlib
import io
import json
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import warmroute

ROOT = Path(__file__).parents[2]
CONVERSATION = "mooncake_conversation.jsonl"
TRACES = {"conversation": CONVERSATION, "tau-bench": "tau_bench_airline_block16.jsonl.gz"}
"""By what a row begins with; rows that name none have their own."""
Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Table:
    """Where it stands, what its rows run, how their cells are written."""

    document: str
    header: str
    """Its first line."""
    base: str
    """Arguments of every row."""
    cells: Callable[[list[Figures]], list[str]]
    """The last cells of a row, from the results of its runs."""
    seeds: tuple[int, ...] = (1,)
    variants: tuple[str, ...] = ("",)
    """Each row is run with each of these arguments more."""


def share(value: float) -> str:
    """``.959``, ``1.000``."""
    return f"{value:.3f}".removeprefix("0")


def seconds(value: float) -> str:
    """To a tenth, beyond 100 to a whole one."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def each(results: Sequence[Figures], read: Callable[[Figures], float], form: Callable[[float], str]) -> str:
    """One figure of every run."""
    between = ", " if len(results) > 2 else " "
    return between.join(form(read(result)) for result in results)


def mean_of(result: Figures, name: str, key: str = "mean") -> float:
    """A figure of a spread."""
    return float(result[name][key])


def of_ideal(result: Figures) -> float:
    """Cached share over the ideal's."""
    return float(result["cached_share"]) / float(result["ideal_cached_share"])


def ttft(value: float) -> str:
    """Three digits."""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}"


def _worth(results: list[Figures]) -> list[str]:
    return [
        each(results, lambda r: mean_of(r, "ttft_s"), ttft)
        + " / "
        + each(results, lambda r: mean_of(r, "ttft_s", "p99"), seconds),
        each(results, lambda r: mean_of(r, "e2e_s"), seconds),
        each(results, lambda r: r["in_slo_share"], share),
        each(results, of_ideal, share),
    ]


def _pools(results: list[Figures]) -> list[str]:
    ttft_cell, e2e, in_slo, _ = _worth(results)
    tpot = (
        each(results, lambda r: mean_of(r, "tpot_ms"), lambda value: f"{value:.1f}")
        + " / "
        + each(results, lambda r: mean_of(r, "tpot_ms", "p99"), lambda value: f"{value:.0f}")
    )
    return [ttft_cell, tpot, e2e, in_slo]


def _policies(results: list[Figures]) -> list[str]:
    """README's."""
    (result,) = results

    def of(spread: str, key: str) -> str:
        value = mean_of(result, spread, key)
        return f"{value:.2f} s" if value < 3 else f"{value:.1f} s"

    shares = (of_ideal(result), result["in_slo_share"])
    times = (("ttft_s", "mean"), ("ttft_s", "p50"), ("ttft_s", "p99"), ("e2e_s", "mean"))
    return [*(of(*time) for time in times), *(f"{value:.2f}".removeprefix("0") for value in shares)]


def _guard(results: list[Figures]) -> list[str]:
    """Means over seeds, without and with."""
    half = len(results) // 2
    sides = (results[:half], results[half:])

    def cell(read: Callable[[Figures], float], form: Callable[[float], str]) -> str:
        return " → ".join(form(fmean(read(result) for result in side)) for side in sides)

    return [
        cell(lambda r: mean_of(r, "ttft_s"), lambda value: f"{value:.2f}".removeprefix("0")),
        cell(lambda r: mean_of(r, "e2e_s"), seconds),
        cell(lambda r: r["in_slo_share"], share),
        cell(lambda r: r["cached_share"], share),
    ]


def _means(results: list[Figures]) -> list[str]:
    """Over seeds."""
    ttft_s, e2e_s = (fmean(mean_of(one, name) for one in results) for name in ("ttft_s", "e2e_s"))
    return [f"{ttft_s:.3f}", f"{e2e_s:.2f}"]


POLICIES = "| policy | TTFT mean | p50 | p99 | E2E mean | cached, of ideal | within SLO |"
GUARD = "| `warmroute simulate … --guard-caches` | TTFT | E2E | in SLO | cached |"
WITHOUT = "| without | command | TTFT s mean / p99 | E2E s | in SLO | cached / ideal |"
BELIEFS = "| beliefs | command | TTFT s mean / p99 | E2E s | in SLO | cached / ideal |"
ROUTERS = "| routers that share | command | TTFT s | E2E s |"
POOLS = "| fleet | command | TTFT s mean / p99 | TPOT ms mean / p99 | E2E s | in SLO |"
TABLES = (
    Table("docs/routing.md", WITHOUT, f"--trace {CONVERSATION} --requests 3000 --rate 2.5", _worth),
    Table(
        "docs/routing.md",
        BELIEFS,
        f"--trace {CONVERSATION} --requests 2000 --rate 2 --capacity 400000",
        _worth,
    ),
    Table(
        "docs/routing.md", POOLS, f"--trace {CONVERSATION} --requests 3000 --rate 2.5", _pools, seeds=(1, 2)
    ),
    Table("docs/routing.md", GUARD, "", _guard, seeds=(1, 2), variants=("", "--guard-caches")),
    Table("README.md", POLICIES, f"--trace {CONVERSATION} --rate 2.5", _policies),
    Table(
        "docs/routing.md",
        ROUTERS,
        f"--trace {CONVERSATION} --requests 3000 --rate 2.5",
        _means,
        seeds=(1, 2, 3, 4, 5, 6),
    ),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its line, and the arguments of each of its runs."""

    table: Table
    line: str
    runs: tuple[tuple[str, ...], ...]

    def now(self, results: list[Figures]) -> str:
        """The line with what the runs gave."""
        made = self.table.cells(results)
        cells = [cell.strip() for cell in self.line.strip("|").split("|")]
        stood = cells[-len(made) :]
        cells[-len(made) :] = [
            f"**{new}**" if old.startswith("**") else new for old, new in zip(stood, made, strict=True)
        ]
        return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def rows() -> Iterator[Row]:
    """Of every table."""
    for table in TABLES:
        lines = (ROOT / table.document).read_text().splitlines()
        at = lines.index(table.header) + 2
        while at < len(lines) and lines[at].startswith("|"):
            yield Row(table, lines[at], tuple(_runs(table, lines[at])))
            at += 1


def _runs(table: Table, line: str) -> Iterator[tuple[str, ...]]:
    first = line.strip("| ").split(" ", 1)[0]
    written = re.search(r"`(\w+ )?(--[^`]*)`", line)
    command = written[2] if written else ""
    if first in TRACES:
        command = f"--trace {TRACES[first]} {command}"
    elif written and written[1]:
        command = f"--trace {written[1]} {command}"
    elif table.header == POLICIES:
        command = f"--policy {first.strip('`')}"
    base = table.base if "--policy" in command else f"{table.base} --policy predicted_finish"
    for count in ("2", "4", "8") if "--routers N" in command else ("",):
        routers = command.replace("--routers N", f"--routers {count}")
        for variant in table.variants:
            for seed in table.seeds:
                yield tuple(shlex.split(f"{base} {routers} {variant} --seed {seed} --json"))


def run(arguments: Sequence[str], folder: Path) -> Figures:
    """What ``warmroute simulate`` prints."""
    given = [str(folder / one) if one in TRACES.values() else one for one in arguments]
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
        code = warmroute.main(["simulate", *given])
    assert code == 0, arguments
    (result,) = json.loads(out.getvalue())
    return dict(result)


def main() -> int:
    """Compare, or write: 0 all as written, 1 some differ."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--write", action="store_true")
    args = parser.parse_args()
    differ = 0
    for row in rows():
        now = row.now([run(arguments, args.folder) for arguments in row.runs])
        if now == row.line:
            continue
        differ += 1
        print(f"- {row.line}\n+ {now}", flush=True)
        if args.write:
            path = ROOT / row.table.document
            path.write_text(path.read_text().replace(row.line, now))
    return 1 if differ and not args.write else 0


if __name__ == "__main__":
    sys.exit(main())
