"""``warmroute simulate``: a trace under several policies, on a virtual clock; one table or JSON."""

import argparse
import sys
import time
from collections.abc import Sequence

import orjson

from router.routing.policies import POLICIES
from sim.command_arguments import add_trace_arguments, number, whole_number
from sim.progress_view import ProgressView
from sim.results import Result, Slo
from sim.results_table import results_table, table_console
from sim.simulate import SimulationSettings, simulate
from sim.simulated_replica import ReplicaSettings
from sim.step_time.presets import PRESET_BATCHED_TOKENS, PRESETS
from sim.workload.sources import open_trace
from sim.workload.trace import Trace, TraceError

DEFAULT_POLICIES = "round_robin,least_loaded,power_of_two,prefix_affinity,predicted_finish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICIES,
        metavar="KIND[,KIND…]",
        help="policies to compare, in this order (default %(default)s)",
    )
    parser.add_argument(
        "--replicas",
        type=whole_number(1),
        default=8,
        metavar="N",
        help="size of the fleet (default %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=number(0.0, above=True),
        default=1.0,
        metavar="X",
        help="timed traces: X times as fast as recorded; sessions: X start in a second (default %(default)g)",
    )
    parser.add_argument(
        "--capacity",
        type=whole_number(1),
        default=3_000_000,
        metavar="TOKENS",
        help="KV tokens one replica holds (default %(default)s)",
    )
    parser.add_argument(
        "--no-hold",
        action="store_true",
        help="predicted_finish sends at once, instead of keeping requests in the router, shortest prefill "
        "first, while their replica has one without a first token",
    )
    parser.add_argument(
        "--step-time",
        choices=sorted(PRESETS),
        default="emufleet",
        help="how long a step of a replica takes (default %(default)s)",
    )
    parser.add_argument(
        "--max-running",
        type=whole_number(1),
        default=128,
        metavar="N",
        help="requests in a replica's batch at once (default %(default)s)",
    )
    parser.add_argument(
        "--network-delay-ms",
        type=number(0.0),
        default=0.0,
        metavar="MS",
        help="one way, between router and replica (default %(default)g)",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 2 the arguments or the trace are wrong."""
    policies = [kind.strip() for kind in args.policy.split(",") if kind.strip()]
    unknown = [kind for kind in policies if kind not in POLICIES]
    if unknown or not policies:
        what = f"unknown policy {', '.join(unknown)}" if unknown else "no policy given"
        return _wrong(
            f"--policy {args.policy}: {what}; expected one or more of {', '.join(sorted(POLICIES))}"
        )
    try:
        settings = SimulationSettings(
            replica=ReplicaSettings(
                capacity_tokens=args.capacity,
                max_running=args.max_running,
                max_batched_tokens=max(args.max_running, PRESET_BATCHED_TOKENS[args.step_time]),
            ),
            step_time=PRESETS[args.step_time],
            slo=Slo(args.slo_ttft_ms, args.slo_tpot_ms),
            hold=not args.no_hold,
            network_delay_s=args.network_delay_ms / 1e3,
            warmup_share=args.warmup,
            mean_think_s=args.think,
        )
        trace = open_trace(args.trace, block_tokens=args.block_size, requests=args.requests, seed=args.seed)
        started_s = time.perf_counter()
        with ProgressView() as view:
            results = simulate(
                trace,
                policies,
                replicas=args.replicas,
                rate=args.rate,
                seed=args.seed,
                settings=settings,
                progress=view.update,
            )
    except (TraceError, ValueError) as error:
        return _wrong(str(error))
    if args.json:
        rows = [result.json_object() for result in results]
        print(orjson.dumps(rows, option=orjson.OPT_INDENT_2).decode())
        return 0
    _print_table(args, trace, results, time.perf_counter() - started_s)
    return 0


def _print_table(
    args: argparse.Namespace, trace: Trace, results: Sequence[Result], computed_s: float
) -> None:
    pace = f"{args.rate:g} sessions a second" if trace.in_sessions else f"{args.rate:g} times as fast"
    measured = results[0].requests
    ideal = results[0].ideal_cached_share
    title = (
        f"{trace.name}, {pace}: {len(trace.requests):,} requests on {args.replicas} replicas of "
        f"{args.capacity:,} KV tokens ({args.step_time}), seed {args.seed}\n"
        f"measured: the last {measured:,} (the first {args.warmup:.0%} of the time warms the caches)"
    )
    if ideal is not None:
        title += f"; one infinite cache would have cached {ideal:.3f} of prompt tokens"
    console = table_console()
    console.print(title, soft_wrap=True)
    console.print(results_table(results, console))
    console.print(
        f"in SLO: TTFT within {args.slo_ttft_ms:g} ms + cold prefill, decoding within 1 s + "
        f"{args.slo_tpot_ms:g} ms a token. Simulated in {computed_s:.1f} s.",
        soft_wrap=True,
    )


def _wrong(message: str) -> int:
    print(f"warmroute simulate: {message}", file=sys.stderr)
    return 2
