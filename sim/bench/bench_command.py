"""``warmroute bench``: what this router costs and wins, and whether the simulator tells the truth."""

import argparse

from sim.bench import (
    decision_command,
    engine_command,
    fidelity_command,
    overhead_command,
    routing_command,
    several_command,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Six benches, each with arguments of its own."""
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, what, example, command in (
        (
            "overhead",
            "CPU per request and per streamed event, before replicas that compute nothing",
            "--rivals rivals",
            overhead_command,
        ),
        (
            "decision",
            "CPU of reading a prompt and choosing its replica, by size of the fleet, without sockets",
            "--replicas 8,256",
            decision_command,
        ),
        (
            "routing",
            "a trace through one router after another, before emulated replicas: TTFT, hit rate, SLO",
            "--rivals rivals",
            routing_command,
        ),
        (
            "fidelity",
            "a trace through our router to replicas of a small model, and the same simulated",
            "--model smollm2",
            fidelity_command,
        ),
        (
            "routers",
            "a trace through 1, 2, 4 and 8 routers that share their state, before emulated replicas",
            "--routers 1,4",
            several_command,
        ),
        (
            "engine",
            "a replica's prefill, decode and cache, beside vLLM's CPU build",
            "--rivals rivals",
            engine_command,
        ),
    ):
        bench = benches.add_parser(
            name, help=what, description=what, epilog=f"example: warmroute bench {name} {example}"
        )
        command.add_arguments(bench)
        bench.set_defaults(run_bench=command.run)


def run(args: argparse.Namespace) -> int:
    """Run the bench: 0 measured, 1 it could not be, 2 the arguments are wrong."""
    code: int = args.run_bench(args)
    return code
