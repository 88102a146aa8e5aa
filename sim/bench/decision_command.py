"""``warmroute bench decision``: CPU of reading a prompt and choosing its replica, by size of the fleet."""

import argparse
import statistics

import orjson
from rich import box
from rich.table import Table

from router.compiled import is_compiled
from sim.bench.decision import LOADS, DecisionCost, Measured, measure_decisions
from sim.command_arguments import add_count, whole_numbers
from sim.progress_view import ProgressView
from sim.results_table import print_whole, table_console

PARTS = ("read", "choose", "later")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    for name, default, what in (("--replicas", "8,64,256", "sizes of fleets"), ("--sizes", "2,32", "KiB")):
        parser.add_argument(
            name, type=whole_numbers, default=default, metavar="N,…", help=f"{what} (default {default})"
        )
    add_count(parser, "--requests", "requests measured in each round", default=3_000)
    add_count(parser, "--rounds", "rounds, of which the median is reported", default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the command."""
    with ProgressView(unit="steps") as view:
        measured = measure_decisions(args.replicas, args.sizes, args.requests, args.rounds, view.update)
    if args.json:
        results = [_as_json(key, _median(costs)) for key, costs in measured.items()]
        print(orjson.dumps({"compiled": is_compiled(), "rounds": args.rounds, "results": results}).decode())
        return 0
    console = table_console()
    print_whole(console, _table(measured, args.replicas, args.sizes))
    form = "compiled" if is_compiled() else "plain Python (make compile makes it a quarter)"
    console.print(
        "µs of CPU a request: until it is on its replica or held + its first token and end (what is learned, "
        f"who goes next).\nThe router ran as {form}; medians of {args.rounds} rounds of {args.requests:,}.",
        markup=False,
    )
    return 0


def _table(measured: Measured, fleets: tuple[int, ...], sizes: tuple[int, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("fleet", no_wrap=True)
    table.add_column("KiB", justify="right")
    for fleet in fleets:
        table.add_column(f"{fleet:,} replicas", justify="right", no_wrap=True)
    growth = len(fleets) > 1
    if growth:
        table.add_column(f"{fleets[-1]:,} : {fleets[0]:,}", justify="right", no_wrap=True)
    for load in LOADS:
        for size in sizes:
            costs = [_median(measured[load, size, fleet]) for fleet in fleets]
            row = [load, f"{size:,}", *(f"{cost.decision_us:.1f} + {cost.later_us:.1f}" for cost in costs)]
            if growth:
                least, most = costs[0], costs[-1]
                all_of_it = most.all_us / least.all_us
                row.append(f"× {most.decision_us / least.decision_us:.2f}; all × {all_of_it:.2f}")
            table.add_row(*row)
    return table


def _median(costs: list[DecisionCost]) -> DecisionCost:
    """Part by part."""
    return DecisionCost(*(statistics.median(getattr(cost, f"{part}_us") for cost in costs) for part in PARTS))


def _as_json(key: tuple[str, int, int], cost: DecisionCost) -> dict[str, str | int | float]:
    load, size, fleet = key
    figures = {f"{part}_us": round(getattr(cost, f"{part}_us"), 2) for part in PARTS}
    return {"load": load, "kib": size, "replicas": fleet, **figures}
