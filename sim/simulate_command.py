"""``warmroute simulate``: a trace under several policies, on a virtual clock."""

import argparse
import sys
import time
from collections.abc import Sequence

from sim.command_arguments import trace_of, traffic
from sim.command_output import complain, print_json
from sim.compare import Comparison, compare
from sim.compare_picture import SUFFIXES, NoMatplotlib, require_matplotlib, write_picture
from sim.compare_view import print_comparison
from sim.explain import explain_differences, lines
from sim.fidelity.report import print_fidelity
from sim.given_options import refuse_given
from sim.lesson.burst_report import burst_lesson_json, print_burst_lesson
from sim.output_file import not_written, require_writable
from sim.progress_view import ProgressView
from sim.replica_arguments import described_step_time
from sim.results import Result
from sim.results_table import results_table, table_console
from sim.simulate import SimulationSettings, simulate
from sim.simulate_arguments import add_arguments, simulation_settings
from sim.trace_remarks import tell_remarks
from sim.workload.arrival_process import retimed
from sim.workload.trace import Trace

__all__ = ["add_arguments", "run"]

LESSON_SEEDS = 10


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 1 a picture could not be made, 2 the arguments or the trace are wrong."""
    policies: list[str] = args.policy
    try:
        _check_modes(args, policies)
        if args.fidelity is not None:
            print_fidelity(args.fidelity or None, table_console())
            return 0
        if args.lesson is not None:
            return _lesson(args)
        settings = simulation_settings(args)
        if args.compare is not None:
            return _compare(args, policies, settings)
        trace = _trace(args, args.seed)
        tell_remarks(trace)
        if args.explain is not None:
            return _explain(args, policies, trace, settings)
        return _simulate(args, policies, trace, settings)
    except NoMatplotlib as error:
        return complain("simulate", error, 1)
    except ValueError as error:
        return complain("simulate", error, 2)


def _check_modes(args: argparse.Namespace, policies: Sequence[str]) -> None:
    modes = [name for name in ("compare", "lesson", "explain", "fidelity") if getattr(args, name) is not None]
    if len(modes) > 1 and modes != ["lesson", "explain"]:
        raise ValueError(f"--{modes[0]} and --{modes[1]} are different things to do; give one of them")
    for name in ("rates", "plot"):
        if getattr(args, name) is not None and args.compare is None:
            raise ValueError(f"--{name} goes with --compare SEEDS")
    if args.fidelity is not None:
        refuse_given(args, args.given - {"--fidelity"}, "without effect: --fidelity takes nothing else")
    if args.lesson is not None:
        used = {"--lesson", "--seed", "--json", "--explain"}
        refuse_given(
            args,
            args.given - used,
            f"without effect: --lesson {args.lesson} has traffic and rules of its own",
        )
        if args.json:
            refuse_given(args, ("--explain",), "without effect: --lesson with --json explains every decision")
        return
    if args.rates is not None:
        refuse_given(args, ("--rate",), "and --rates both say how fast requests come; give one of them")
    if args.explain is not None:
        if len(policies) != 2:
            raise ValueError(f"--explain compares two policies, --policy has {len(policies)}; give two")
        refuse_given(args, ("--json",), "without effect: --explain prints text")
        if args.routers > 1:
            refuse_given(args, ("--routers", "--peer-lag"), "without effect: --explain looks at one router")


def _lesson(args: argparse.Namespace) -> int:
    if args.json:
        print_json(burst_lesson_json(seeds=LESSON_SEEDS, first_seed=args.seed))
    else:
        print_burst_lesson(table_console(), seeds=LESSON_SEEDS, first_seed=args.seed, decisions=args.explain)
    return 0


def _trace(args: argparse.Namespace, seed: int) -> Trace:
    trace = trace_of(args, seed)
    return trace if args.arrivals is None else retimed(trace, args.arrivals, seed)


def _simulate(
    args: argparse.Namespace, policies: Sequence[str], trace: Trace, settings: SimulationSettings
) -> int:
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
    if args.json:
        print_json([result.json_object() for result in results])
    else:
        _print_table(args, trace, results, settings, time.perf_counter() - started_s)
    return 0


def _compare(args: argparse.Namespace, policies: Sequence[str], settings: SimulationSettings) -> int:
    if args.plot is not None:
        require_writable("--plot", args.plot, SUFFIXES)
        require_matplotlib()
    with ProgressView() as view:
        made = compare(
            lambda seed: _trace(args, seed),
            policies,
            seeds=args.compare,
            rates=args.rates or (args.rate,),
            first_seed=args.seed,
            replicas=args.replicas,
            settings=settings,
            progress=view.update,
        )
    trace = _trace(args, args.seed)
    tell_remarks(trace)
    unit = "sessions started a second" if trace.in_sessions else "requests a second"
    if args.json:
        print_json(made.json_object())
    else:
        console = table_console()
        console.print(
            f"{_title(args, trace, settings)}, seeds {made.seeds[0]} to {made.seeds[-1]}", soft_wrap=True
        )
        print_comparison(made, console, unit)
    if args.plot is not None:
        return _plot(args, made, unit, _title(args, trace, settings))
    return 0


def _plot(args: argparse.Namespace, made: Comparison, unit: str, title: str) -> int:
    try:
        for path in write_picture(made, args.plot, unit, title):
            print(f"wrote {path}", file=sys.stderr)
    except OSError as error:
        return complain("simulate", not_written("--plot", args.plot, error), 1)
    return 0


def _explain(
    args: argparse.Namespace, policies: Sequence[str], trace: Trace, settings: SimulationSettings
) -> int:
    policy, other = policies
    with ProgressView() as view:
        shadow = explain_differences(
            trace,
            policy,
            other,
            most=args.explain,
            replicas=args.replicas,
            rate=args.rate,
            seed=args.seed,
            settings=settings,
            progress=view.update,
        )
    print(_title(args, trace, settings))
    for line in lines(shadow, policy, other):
        print(line)
    return 0


def _title(args: argparse.Namespace, trace: Trace, settings: SimulationSettings) -> str:
    return (
        f"{trace.name}: {len(trace.requests):,} requests {_fleet(args)} of "
        f"{settings.replica.capacity_tokens:,} KV tokens ({described_step_time(args)})"
    )


def _fleet(args: argparse.Namespace) -> str:
    """Like ``on 8 replicas``, ``by 2 routers on 6 replicas and 2 that answer for them``."""
    routers = "" if args.routers == 1 else f"by {args.routers} routers "
    pool = f" and {args.decode_pool} that answer for them" if args.decode_pool else ""
    return f"{routers}on {args.replicas} replicas{pool}"


def _print_table(
    args: argparse.Namespace,
    trace: Trace,
    results: Sequence[Result],
    settings: SimulationSettings,
    computed_s: float,
) -> None:
    measured = results[0].requests
    ideal = results[0].ideal_cached_share
    title = (
        f"{traffic(trace, args.rate)} {_fleet(args)} of "
        f"{settings.replica.capacity_tokens:,} KV tokens ({described_step_time(args)}), seed {args.seed}\n"
        f"measured: the last {measured:,} (the first {args.warmup:.0%} of the time warms the caches)"
    )
    if ideal is not None:
        title += f"; one infinite cache would have cached {ideal:.3f} of prompt tokens"
    console = table_console()
    console.print(title, soft_wrap=True)
    console.print(results_table(results, console))
    console.print(
        f"in SLO: TTFT within {args.slo_ttft_ms:g} ms + cold prefill, decoding within 1 s + "
        f"{args.slo_tpot_ms:g} ms a token; TTFT in SLO: the first alone. Simulated in {computed_s:.1f} s.",
        soft_wrap=True,
    )
