"""``warmroute bench routers``: what it costs that several routers decide, and not one."""

import argparse

import uvloop

from sim.bench.routing_command import add_plan_arguments, plan_of
from sim.bench.several import Run, measure_several
from sim.command_arguments import trace_of, traffic
from sim.command_output import complain, print_json
from sim.demo.processes import ChildError
from sim.progress_view import ProgressView
from sim.results_table import client_warning, results_table, table_console
from sim.trace_remarks import tell_remarks
from sim.workload.trace import Trace

MOST_ROUTERS = 32


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_plan_arguments(parser)
    parser.add_argument(
        "--routers",
        type=_counts,
        default=(1, 2, 4, 8),
        metavar="N,…",
        help="how many routers, one run each; all are compared with the first (default 1,2,4,8)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 measured, 1 it could not be, 2 the arguments or the trace are wrong."""
    try:
        trace = trace_of(args)
    except ValueError as error:
        return complain("bench routers", error, 2)
    tell_remarks(trace)
    try:
        with ProgressView() as view:
            runs = uvloop.run(measure_several(args.routers, trace, plan_of(args), view.update))
    except ChildError as error:
        return complain("bench routers", error, 1)
    if args.json:
        found = [
            {"routers": one.routers, "ttft_mean_of_first": _of_first(one, runs), **one.result.json_object()}
            for one in runs
        ]
        print_json({"results": found})
    else:
        _print_report(runs, trace, args)
    return 0


def _of_first(run: Run, runs: list[Run]) -> float | None:
    """Its mean TTFT over that of the first run."""
    first, mean = runs[0].result.ttft_s.mean, run.result.ttft_s.mean
    return None if not first or mean is None else mean / first


def _print_report(runs: list[Run], trace: Trace, args: argparse.Namespace) -> None:
    console = table_console()
    console.print(
        f"{traffic(trace, args.rate)} over HTTP, in turn to each router, to "
        f"{args.replicas} emulated replicas; one run each; seconds are theirs, {args.speed:g} to one of the "
        "wall's",
        soft_wrap=True,
        markup=False,
    )
    console.print(results_table([one.result for one in runs], console, subject="routers"))
    for one in runs[1:]:
        share = _of_first(one, runs)
        if share is not None:
            console.print(f"{one.result.policy}: mean TTFT {share:.3f} × that of {runs[0].result.policy}")
    late = max((one.result.send_lag_p99_s or 0.0 for one in runs), default=0.0)
    console.print(f"Requests were sent at most {1e3 * late:.0f} ms late (p99, replicas' time).", markup=False)
    if warning := client_warning([one.result for one in runs]):
        console.print(warning, soft_wrap=True, markup=False)


def _counts(text: str) -> tuple[int, ...]:
    counts = tuple(
        int(part) for part in text.split(",") if part.isdecimal() and 1 <= int(part) <= MOST_ROUTERS
    )
    if not counts or len(counts) != len(text.split(",")):
        raise argparse.ArgumentTypeError(f"{text!r}; expected numbers from 1 to {MOST_ROUTERS}, like 1,2,4")
    return counts
