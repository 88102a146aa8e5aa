"""``warmroute demo``: a fleet of a real small model, real conversations, one policy after the other."""

import argparse
import asyncio
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from router.routing.policies import POLICIES
from sim.command_arguments import whole_number
from sim.demo.conversation_script import make_script
from sim.demo.demo_run import DemoOutcome, DemoPlan, run_demo
from sim.demo.local_fleet import ReplicaPlan, cores
from sim.demo.processes import ChildError
from sim.demo.report import explanation, result_table
from sim.demo.views import View, make_view
from sim.output_file import UnwritableFile, not_written, require_writable
from sim.results_table import table_console

REPLICAS = 3
STEP_TOKENS = 256


class ArgumentError(Exception):
    """An argument is wrong: which, what was expected."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--policies",
        default="round_robin,predicted_finish",
        metavar="KIND,KIND",
        help="policies to play the script under, in this order (default %(default)s)",
    )
    parser.add_argument("--model", default="smollm2", help="what the replicas serve (default %(default)s)")
    for name, least, default, text in (
        ("--conversations", 1, 18, "how many conversations, a third of them in a burst"),
        ("--turns", 1, 4, "turns of each conversation"),
        ("--reply-tokens", 1, 16, "longest reply"),
        ("--kv-tokens", 2_048, 8_192, "tokens that each replica's KV cache holds"),
        ("--seed", 0, 1, "seed of the script"),
    ):
        parser.add_argument(
            name,
            type=whole_number(least),
            default=default,
            metavar="N",
            help=f"{text} (default %(default)s)",
        )
    parser.add_argument("--json", metavar="FILE", help="write the figures there too")
    parser.add_argument("--keep-logs", action="store_true", help="keep configs and logs of all processes")


def run(args: argparse.Namespace) -> int:
    """Run the command; 0 done, 1 something failed, 2 wrong arguments, 130 interrupted."""
    try:
        plan = demo_plan(args)
    except (ArgumentError, UnwritableFile) as error:
        print(f"warmroute demo: {error}", file=sys.stderr)
        return 2
    console = table_console()
    folder = Path(tempfile.mkdtemp(prefix="warmroute-demo-"))
    keep, began_at = bool(args.keep_logs), time.monotonic()
    try:
        outcome = asyncio.run(_until_signalled(plan, folder, make_view(console)))
    except ChildError as error:
        keep = True
        print(f"warmroute demo: {error}", file=sys.stderr)
        return 1
    except (KeyboardInterrupt, asyncio.CancelledError):
        print("warmroute demo: interrupted; everything it started is stopped", file=sys.stderr)
        return 130
    finally:
        if keep:
            print(f"configs and logs: {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)
    _report(console, outcome, time.monotonic() - began_at)
    if args.json:
        made = orjson.dumps(_json_object(outcome), option=orjson.OPT_INDENT_2)
        try:
            Path(args.json).write_bytes(made + b"\n")
        except OSError as error:
            print(f"warmroute demo: {not_written('--json', args.json, error)}", file=sys.stderr)
            return 1
    failed = sum(run.result.errors for run in outcome.runs)
    if failed:
        print(f"warmroute demo: {failed} requests failed, the first: {outcome.first_error}", file=sys.stderr)
    return 1 if failed else 0


def demo_plan(args: argparse.Namespace) -> DemoPlan:
    """The checked plan; raises ``ArgumentError`` or ``UnwritableFile``."""
    policies = tuple(kind.strip() for kind in args.policies.split(",") if kind.strip())
    unknown = [kind for kind in policies if kind not in POLICIES]
    if unknown or not policies or len(set(policies)) < len(policies):
        raise ArgumentError(
            f"--policies {args.policies!r}: expected one or more different of {', '.join(POLICIES)}"
        )
    if args.json:
        require_writable("--json", args.json)
    return DemoPlan(
        policies=policies,
        replicas=REPLICAS,
        replica=ReplicaPlan(
            args.model, args.kv_tokens, step_tokens=STEP_TOKENS, threads=max(1, cores() // REPLICAS)
        ),
        script=make_script(args.conversations, args.turns, args.seed),
        reply_tokens=args.reply_tokens,
    )


async def _until_signalled(plan: DemoPlan, folder: Path, view: View) -> DemoOutcome:
    """The demo; a signal cancels it. Raises ``CancelledError`` after one, whatever else it brought about."""
    task = asyncio.current_task()
    assert task is not None
    loop, signalled = asyncio.get_running_loop(), asyncio.Event()

    def on_signal() -> None:
        signalled.set()
        task.cancel()

    for sig in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(sig, on_signal)
    try:
        outcome = await run_demo(plan, folder, view)
    except ChildError:
        if signalled.is_set():
            raise asyncio.CancelledError from None
        raise
    if signalled.is_set():
        raise asyncio.CancelledError
    return outcome


def _report(console: Console, outcome: DemoOutcome, took_s: float) -> None:
    console.print()
    console.print(result_table(outcome.runs))
    console.print()
    memory = outcome.peak_memory_mib
    took = f"{took_s:.0f} s in all"
    if memory is not None:
        took += f"; at most {memory / 1_024:.1f} GiB of memory in all processes together"
    for sentence in (*explanation(outcome.runs, outcome.prefill_s_per_token), took):
        console.print(sentence, markup=False, soft_wrap=not console.is_terminal)


def _json_object(outcome: DemoOutcome) -> dict[str, Any]:
    memory = outcome.peak_memory_mib
    return {
        "prefill_ms_per_token": round(outcome.prefill_s_per_token * 1_000.0, 4),
        "peak_memory_mib": None if memory is None else round(memory),
        "runs": [run.json_object() for run in outcome.runs],
    }
