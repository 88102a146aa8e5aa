"""``warmroute bench fidelity``: how near the simulator comes to our router over HTTP."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

import uvloop

from sim.bench.emulated_fidelity import emulated_fidelity
from sim.bench.http_fidelity import SIMULATED_SEEDS, HttpFidelityPlan, http_fidelity, usual_plan
from sim.bench.routing import RoutingPlan
from sim.bench.routing_command import add_speed_argument
from sim.bench.side_by_side import (
    Pair,
    json_object,
    meaning_of_marks,
    pairs_of,
    table_of,
    verdict_on_order,
    verdicts,
)
from sim.calibrate.calibrate_command import cost_keys
from sim.command_arguments import add_count, add_factor, number
from sim.command_output import complain, print_json
from sim.demo.processes import ChildError
from sim.progress_view import ProgressView
from sim.results_table import print_whole, table_console
from sim.simulate_arguments import policy_kinds
from sim.workload.sources import SHIPPED_TRACE, open_trace

EMULATED = "emulated"
EMULATED_REQUESTS = 600
EMULATED_SPEED = 4.0
MOST_OTHER_WORK = 0.05
"""Share of the machine that other programs may take before times are doubted."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    real, small, emulated = usual_plan("tiny"), usual_plan("smollm2"), RoutingPlan()
    parser.add_argument(
        "--model",
        default=EMULATED,
        help="tiny or smollm2: real replicas of ours, measured first; or emulated: the benchmark's, which "
        "take the time that they should and compute nothing (default %(default)s)",
    )
    parser.add_argument(
        "--policy",
        type=policy_kinds,
        metavar="KIND[,KIND…]",
        help=f"the router's policies to try (default {','.join(real.policies)}, or "
        f"{','.join(small.policies)} where real replicas' model is not tiny)",
    )
    says = f"default {emulated.replicas} emulated ones, or {real.replicas} real ones of one thread each"
    add_count(parser, "--replicas", says)
    add_count(
        parser,
        "--requests",
        f"under each policy, in a round (default {EMULATED_REQUESTS} of Mooncake's, or {real.requests} to "
        f"apps with system prompts, {small.requests} where the model is not tiny)",
    )
    parser.add_argument("--seed", type=int, default=1, help="of the traffic (default %(default)s)")
    group = parser.add_argument_group("emulated replicas")
    add_factor(group, "--rate", "times as fast as recorded", default=emulated.rate)
    add_speed_argument(group, default=EMULATED_SPEED)
    group = parser.add_argument_group("real replicas (defaults for tiny; for others)")
    add_count(group, "--rounds", f"times that each policy is tried ({real.rounds}; {small.rounds})")
    add_count(group, "--apps", f"apps, each with a system prompt of its own ({real.apps}; {small.apps})")
    says = f"median length of these ({real.system_tokens}; {small.system_tokens})"
    add_count(group, "--system-tokens", says)
    says = f"tokens that each one's KV cache holds ({real.kv_tokens}; {small.kv_tokens})"
    add_count(group, "--kv-tokens", says)
    group.add_argument(
        "--load",
        type=number(0.0, above=True),
        metavar="X",
        help="share of their time that the requests would take if nothing were cached "
        f"({real.load:g}; {small.load:g})",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 measured, 1 it could not be."""
    try:
        made, told, title = _emulated(args) if args.model == EMULATED else _real(args)
    except (ChildError, ValueError) as error:
        return complain("bench fidelity", error, 1)
    if args.json:
        print_json(told | json_object(made))
        return 0
    console = table_console()
    console.print(title, soft_wrap=True, markup=False)
    print_whole(console, table_of(made))
    console.print(meaning_of_marks(made), soft_wrap=True, markup=False)
    for verdict in (*verdicts(made), verdict_on_order(made)):
        console.print(verdict, soft_wrap=True, markup=False)
    return 0


def _emulated(args: argparse.Namespace) -> tuple[list[Pair], dict[str, object], str]:
    trace = open_trace(SHIPPED_TRACE, requests=args.requests or EMULATED_REQUESTS)
    plan = RoutingPlan(
        replicas=args.replicas or RoutingPlan().replicas, rate=args.rate, speed=args.speed, seed=args.seed
    )
    with ProgressView() as view:
        policies = args.policy or HttpFidelityPlan().policies
        live, simulated = uvloop.run(emulated_fidelity(policies, trace, plan, view.update))
    title = (
        f"{trace.name}, {plan.rate:g} times as fast, {len(trace.requests):,} requests over HTTP to "
        f"{plan.replicas} emulated replicas ({plan.speed:g} times as fast as the wall), and simulated"
    )
    return pairs_of(live, simulated), {"rate": plan.rate}, title


def _real(args: argparse.Namespace) -> tuple[list[Pair], dict[str, object], str]:
    given = {
        "replicas": args.replicas,
        "requests": args.requests,
        "rounds": args.rounds,
        "load": args.load,
        "apps": args.apps,
        "system_tokens": args.system_tokens,
        "kv_tokens": args.kv_tokens,
        "policies": tuple(args.policy) if args.policy else None,
    }
    plan = replace(
        usual_plan(args.model),
        seed=args.seed,
        **{name: value for name, value in given.items() if value is not None},
    )
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder, ProgressView() as view:
        made = uvloop.run(http_fidelity(plan, Path(folder), view.update))
    model = made.model
    cost = cost_keys(model.prefill, model.decode)
    shown = ", ".join(f"{name} {value:g}" for name, value in cost.items())
    title = (
        f"{plan.rounds} x {plan.requests} requests, {made.rate:.3g} a second, over HTTP to {plan.replicas} "
        f"replicas of {plan.model}, and simulated with {SIMULATED_SEEDS} seeds\n"
        f"measured before: {shown}; one prefill is off by {model.prefill_error.mean:.0%} in the mean"
    )
    told: dict[str, object] = {
        "cost": cost,
        "prefill_noise": model.prefill_error.mean,
        "requests_per_s": made.rate,
        "others_share": made.others_share,
    }
    if (others := made.others_share) is not None and others > MOST_OTHER_WORK:
        title += (
            f"\nother programs took {others:.0%} of the machine meanwhile: times, and what is chosen by "
            "them, say little"
        )
    return pairs_of(made.live, made.simulated, made.followed, made.same_decisions), told, title
