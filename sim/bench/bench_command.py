"""``warmroute bench``: what this router costs and wins, beside the others found on the machine."""

import argparse
from pathlib import Path

from sim.bench import overhead_command, routing_command


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Two benches, each with arguments of its own."""
    benches = parser.add_subparsers(dest="bench", metavar="WHAT", required=True)
    for name, what, command in (
        (
            "overhead",
            "CPU per request and per streamed event, before replicas that compute nothing",
            overhead_command,
        ),
        (
            "routing",
            "a trace through one router after another, before emulated replicas: TTFT, hit rate, SLO",
            routing_command,
        ),
    ):
        bench = benches.add_parser(
            name, help=what, description=what, epilog=f"example: warmroute bench {name} --rivals rivals"
        )
        bench.add_argument(
            "--rivals",
            type=_folder,
            metavar="DIR",
            help="where sglang-router, vllm-router and smg are installed, each as DIR/NAME (an environment "
            "or a program); what is on PATH is found without it",
        )
        command.add_arguments(bench)
        bench.set_defaults(run_bench=command.run)


def run(args: argparse.Namespace) -> int:
    """Run the bench: 0 measured, 1 it could not be, 2 the arguments are wrong."""
    code: int = args.run_bench(args)
    return code


def _folder(text: str) -> Path:
    folder = Path(text)
    if not folder.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a folder that exists")
    return folder.resolve()
