"""``warmroute bench overhead``: what this router costs beside the others found on the machine."""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import orjson
import uvloop

from router.compiled import is_compiled
from sim.bench.load import LoadError, wrk_path
from sim.bench.overhead import OverheadPlan, RouterCost, measure_overhead
from sim.bench.overhead_report import as_json, cost_table, ratio_table
from sim.bench.process_cpu import NO_PROC, available
from sim.bench.rivals_argument import add_rivals_argument
from sim.bench.routers import Absent, find_rivals, ours
from sim.command_arguments import add_count, number, whole_numbers
from sim.command_output import complain
from sim.demo.processes import ChildError, ChildProcesses, free_ports
from sim.progress_view import ProgressView
from sim.results_table import print_whole, table_console

MOCK_LIMIT_S = 20.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_rivals_argument(parser)
    plan = OverheadPlan()
    parser.add_argument(
        "--sizes",
        type=whole_numbers,
        default=plan.sizes_kib,
        metavar="KIB,…",
        help=f"sizes of the prompts, default {','.join(map(str, plan.sizes_kib))}",
    )
    parser.add_argument(
        "--seconds",
        type=number(0.0, above=True),
        default=plan.seconds,
        metavar="S",
        help="of load per size, router and round (default %(default)g)",
    )
    for name, default, what in (
        ("rounds", plan.rounds, "rounds, of which the median is reported"),
        ("connections", plan.connections, "connections that ask side by side"),
        ("streams", plan.streams, "streams open at once"),
        ("events", plan.events, "events per stream, one every 20 ms"),
        ("replicas", plan.replicas, "replicas, a process each"),
    ):
        add_count(parser, f"--{name}", what, default=default)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the tables")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 measured, 1 it could not be."""
    if not available():
        return complain("bench overhead", NO_PROC, 1)
    plan = OverheadPlan(
        args.sizes, args.seconds, args.rounds, args.connections, args.streams, args.events, args.replicas
    )
    try:
        with ProgressView(unit="steps") as view:
            costs, absent = uvloop.run(_measure(plan, args.rivals, view.update))
    except (ChildError, LoadError) as error:
        return complain("bench overhead", error, 1)
    wrk = wrk_path(plan.seconds) is not None
    if args.json:
        load = "wrk" if wrk else "own"
        print(orjson.dumps(as_json(costs, absent, plan, load=load, compiled=is_compiled())).decode())
        return 0
    _print_report(costs, absent, plan, wrk=wrk)
    return 0


async def _measure(
    plan: OverheadPlan, rivals: Path | None, progress: Callable[[str, int, int], None]
) -> tuple[list[RouterCost], list[Absent]]:
    found, missing = find_rivals(rivals)
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as name:
        folder = Path(name)
        with ChildProcesses(folder) as children:
            replicas = await _start_replicas(children, plan.replicas)
            costs, failed = await measure_overhead(
                [ours(), *found], plan, replicas, children, folder, progress
            )
    if not costs or costs[0].name != ours().name:
        raise ChildError(failed[0].why)
    return costs, missing + failed


async def _start_replicas(children: ChildProcesses, count: int) -> list[str]:
    """URLs of ``count`` mock replicas that answer."""
    urls = []
    for at, port in enumerate(free_ports(count)):
        command = [sys.executable, "-P", "-m", "sim.bench.mock_replica", str(port)]
        child = children.start(f"replica-{at}", command)
        urls.append(f"http://127.0.0.1:{port}")
        await children.wait_ready(child, urls[-1] + "/health", MOCK_LIMIT_S)
    return urls


def _print_report(costs: list[RouterCost], absent: list[Absent], plan: OverheadPlan, *, wrk: bool) -> None:
    console = table_console()
    print_whole(console, cost_table(costs, plan))
    if len(costs) > 1:
        print_whole(console, ratio_table(costs, plan))
    for one in absent:
        console.print(f"not measured: {one.name}: {one.why}", markup=False)
    form = "compiled" if is_compiled() else "plain Python (make compile halves it)"
    console.print(
        f"warmroute ran as {form}. Medians over rounds of {plan.seconds:g} s: {plan.rounds}.", markup=False
    )
    if not wrk:
        console.print(
            "wrk was not used, the load comes from a client in Python: CPU is the router's own all the same, "
            "but answers/s are the client's limit, not the router's.",
            markup=False,
        )
