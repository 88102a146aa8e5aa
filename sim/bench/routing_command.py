"""``warmroute bench routing``: who puts requests where they are answered soonest."""

import argparse

import uvloop

from sim.bench.rivals_argument import add_rivals_argument
from sim.bench.routers import Absent, find_rivals, ours
from sim.bench.routing import RoutingPlan, measure_routing, scaled
from sim.command_arguments import (
    Arguments,
    add_count,
    add_factor,
    add_rate_argument,
    add_trace_arguments,
    slo_of,
    trace_of,
    traffic,
)
from sim.command_output import complain, print_json
from sim.demo.processes import ChildError
from sim.progress_view import ProgressView
from sim.results import Result
from sim.results_table import client_warning, results_table, table_console
from sim.trace_remarks import tell_remarks
from sim.workload.trace import Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_rivals_argument(parser)
    add_plan_arguments(parser)
    parser.add_argument(
        "--only", metavar="WORD,…", help="only routers whose name has one of these words in it"
    )


def add_plan_arguments(parser: argparse.ArgumentParser) -> None:
    """The trace, how fast it is sent, and to what."""
    plan = RoutingPlan()
    add_trace_arguments(parser)
    add_rate_argument(parser, default=plan.rate)
    add_speed_argument(parser, default=plan.speed)
    add_count(parser, "--replicas", "emulated replicas", default=plan.replicas)


def add_speed_argument(parser: Arguments, *, default: float) -> None:
    """How fast the emulated replicas' clock goes."""
    says = "emulate replicas X times as fast, so that the run takes that much less"
    add_factor(parser, "--speed", says, default=default)


def plan_of(args: argparse.Namespace) -> RoutingPlan:
    """What the arguments say."""
    slo = slo_of(args)
    return RoutingPlan(args.replicas, args.rate, args.speed, args.seed, args.warmup, args.think, slo)


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 measured, 1 it could not be, 2 the arguments or the trace are wrong."""
    try:
        trace = trace_of(args)
    except ValueError as error:
        return complain("bench routing", error, 2)
    tell_remarks(trace)
    plan = plan_of(args)
    found, missing = find_rivals(args.rivals)
    routers = [ours(scaled(plan.slo, args.speed)), *found]
    if args.only is not None:
        words = args.only.split(",")
        routers = [router for router in routers if any(word in router.name for word in words)]
    if not routers:
        return complain(
            "bench routing", f"--only {args.only}: no router found has one of these in its name", 2
        )
    try:
        with ProgressView() as view:
            results, failed = uvloop.run(measure_routing(routers, trace, plan, view.update))
    except ChildError as error:
        return complain("bench routing", error, 1)
    absent = missing + failed
    if args.json:
        print_json(_as_json(results, absent))
    else:
        _print_report(results, absent, trace, plan)
    return 0 if results else 1


def _as_json(results: list[Result], absent: list[Absent]) -> dict[str, object]:
    return {
        "results": [result.json_object() for result in results],
        "not_measured": [{"router": one.name, "why": one.why} for one in absent],
    }


def _print_report(results: list[Result], absent: list[Absent], trace: Trace, plan: RoutingPlan) -> None:
    console = table_console()
    console.print(
        f"{traffic(trace, plan.rate)} over HTTP to {plan.replicas} emulated "
        f"replicas, one run per router; seconds are theirs, {plan.speed:g} to one of the wall's",
        soft_wrap=True,
        markup=False,
    )
    if results:
        console.print(results_table(results, console, subject="router"))
    for one in absent:
        console.print(f"not measured: {one.name}: {one.why}", soft_wrap=True, markup=False)
    late = max((result.send_lag_p99_s or 0.0 for result in results), default=0.0)
    console.print(f"Requests were sent at most {1e3 * late:.0f} ms late (p99, replicas' time).", markup=False)
    if warning := client_warning(results):
        console.print(warning, soft_wrap=True, markup=False)
