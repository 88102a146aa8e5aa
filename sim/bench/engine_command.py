"""``warmroute bench engine``: what a replica computes in a second, beside vLLM's CPU build."""

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

import uvloop

from sim.bench.bookkeeping import CACHES, bookkeeping_us
from sim.bench.engine_load import EngineFigures, measure_engine
from sim.bench.engine_report import as_json, engine_table
from sim.bench.engines import MODEL, EngineProgram, export_command, our_engine, vllm_engine
from sim.bench.process_cpu import NO_PROC, available
from sim.bench.rivals_argument import add_rivals_argument
from sim.bench.routers import Absent
from sim.command_arguments import add_count
from sim.command_output import complain, print_json
from sim.demo.processes import ChildError, ChildProcesses, free_ports
from sim.progress_view import ProgressView
from sim.results_table import print_whole, table_console

START_LIMIT_S = 600.0
PARTS = 6
WARM_UP_WORDS = 64


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    add_rivals_argument(parser)
    parser.add_argument(
        "--model", default="smollm2", help="what replica configs call model (default %(default)s)"
    )
    parser.add_argument(
        "--dtype",
        action="append",
        metavar="KIND",
        help="of the replica's weights, as in its config; may be repeated (default bf16)",
    )
    for name, default, what in (
        ("rounds", 3, "rounds, of which medians are reported; every engine in each"),
        ("words", 1_000, "of a prompt, a token each for most models"),
        ("threads", None, "cores of every engine (default: what each takes by itself)"),
    ):
        add_count(parser, f"--{name}", what, default=default)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 measured, 1 it could not be."""
    if not available():
        return complain("bench engine", NO_PROC, 1)
    bookkeeping = {name: bookkeeping_us(settings) for name, settings in CACHES.items()}
    try:
        with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as name:
            programs, absent, weights = _programs(args, Path(name))
            with ProgressView(unit="parts") as view, ChildProcesses(Path(name)) as children:
                rounds = uvloop.run(_measure(programs, weights, children, args, view))
    except ChildError as error:
        return complain("bench engine", error, 1)
    if args.json:
        result = as_json(rounds, bookkeeping) | {
            "not_measured": [{"engine": one.name, "why": one.why} for one in absent]
        }
        print_json(result)
        return 0
    console = table_console()
    print_whole(console, engine_table(rounds))
    for cache, us in bookkeeping.items():
        console.print(f"{cache}: {us:.0f} µs of CPU per 1,000 prompt tokens (hash, match, allocate)")
    for one in absent:
        console.print(f"not measured: {one.name}: {one.why}", markup=False)
    return 0


def _programs(
    args: argparse.Namespace, folder: Path
) -> tuple[list[EngineProgram], list[Absent], Path | None]:
    """The engines to start, those that are not here, and where the model must be written for them first."""
    dtypes = list(dict.fromkeys(args.dtype or ["bf16"]))
    *own, last = free_ports(len(dtypes) + 1)
    programs = [
        our_engine(args.model, dtype, args.threads, port, folder)
        for dtype, port in zip(dtypes, own, strict=True)
    ]
    readable = Path(args.model).is_dir()
    weights = Path(args.model) if readable else folder / "weights"
    rival = vllm_engine(args.rivals, weights, args.threads, last)
    if isinstance(rival, Absent):
        return programs, [rival], None
    return [*programs, rival], [], None if readable else weights


async def _measure(
    programs: Sequence[EngineProgram],
    weights: Path | None,
    children: ChildProcesses,
    args: argparse.Namespace,
    view: ProgressView,
) -> dict[str, list[EngineFigures]]:
    """Every engine in every round, one after the other; the others are up, and stand still meanwhile."""
    if weights is not None:
        writer = children.start("export", export_command(args.model, weights))
        await asyncio.to_thread(writer.wait, START_LIMIT_S)
        if writer.exit_code != 0:
            raise writer.died()
    rounds: dict[str, list[EngineFigures]] = {program.name: [] for program in programs}
    parts = dict.fromkeys(rounds, 0)
    running = []
    for program in programs:
        child = children.start(program.name.replace(" ", "-"), program.command, program.environment)
        await children.wait_ready(child, f"{program.url}/health", START_LIMIT_S)
        await measure_engine(program.url, MODEL, child.pid, WARM_UP_WORDS, 0, lambda: None)
        running.append(child)
    for number in range(1, args.rounds + 1):
        for program, child in zip(programs, running, strict=True):

            def progress(name: str = program.name) -> None:
                parts[name] += 1
                view.update(name, parts[name], args.rounds * PARTS)

            with children.alone(child):
                figures = await measure_engine(program.url, MODEL, child.pid, args.words, number, progress)
            rounds[program.name].append(figures)
    return rounds
