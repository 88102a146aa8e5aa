"""``warmroute diagnose``: why the hit rate is what it is, token by token."""

import argparse
import sys
from pathlib import Path

import orjson

from sim.command_arguments import add_sample_arguments, number
from sim.contender import CONTENDERS, names
from sim.diagnose.diagnosis import Diagnosis, diagnose
from sim.diagnose.report import json_object, report
from sim.diagnose.report_view import html_page, print_report
from sim.diagnose.sample import Sample, open_sample
from sim.progress_view import ProgressView
from sim.results_table import table_console
from sim.simulate_arguments import add_fleet_arguments, add_replica_arguments, simulation_settings

DEFAULT_REPLICAS = 8
DEFAULT_WARMUP = 0.25
DEFAULT_DOLLARS_PER_HOUR = 2.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "file",
        metavar="FILE",
        help="a request log or OpenAI request bodies, one JSON object per line; or any trace that "
        "simulate takes",
    )
    parser.add_argument(
        "--policy",
        default="predicted_finish",
        metavar="KIND[,KIND…]",
        help="policies to simulate; the first stands for the fleet where the log does not tell where "
        "requests went (default %(default)s)",
    )
    parser.add_argument(
        "--rate",
        type=number(0.0, above=True),
        default=1.0,
        metavar="X",
        help="timed traces: X times as fast as recorded; sessions: X start in a second (default %(default)g)",
    )
    parser.add_argument(
        "--dollars-per-hour",
        type=number(0.0),
        default=DEFAULT_DOLLARS_PER_HOUR,
        metavar="X",
        help="price of one replica (default %(default)g)",
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file, too")
    add_sample_arguments(parser)
    add_replica_arguments(parser.add_argument_group("replicas"))
    add_fleet_arguments(parser.add_argument_group("routers and what goes between"))
    parser.set_defaults(replicas=None, warmup=None)


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 1 the HTML file cannot be written, 2 the arguments or the file are wrong."""
    policies = [kind.strip() for kind in args.policy.split(",") if kind.strip()]
    unknown = [kind for kind in policies if kind not in CONTENDERS]
    if unknown or not policies:
        what = f"unknown policy {', '.join(unknown)}" if unknown else "no policy given"
        return _say(f"--policy {args.policy}: {what}; expected one or more of {names()}", 2)
    try:
        sample = open_sample(args.file, block_tokens=args.block_size, requests=args.requests, seed=args.seed)
        diagnosis = _diagnosed(args, sample, policies)
    except ValueError as error:
        return _say(str(error), 2)
    written = report(diagnosis, args.dollars_per_hour)
    if args.json:
        made = json_object(diagnosis, args.dollars_per_hour)
        print(orjson.dumps(made, option=orjson.OPT_INDENT_2).decode())
    else:
        print_report(written, table_console())
    if args.html is not None:
        try:
            Path(args.html).write_text(html_page(written), encoding="utf-8")
        except OSError as error:
            return _say(f"--html {args.html}: cannot be written: {error.strerror}", 1)
    return 0


def _diagnosed(args: argparse.Namespace, sample: Sample, policies: list[str]) -> Diagnosis:
    warmup = args.warmup
    if warmup is None:  # a file of prompts without times is looked at whole
        warmup = 0.0 if sample.words and not sample.timed else DEFAULT_WARMUP
    args.warmup = warmup
    with ProgressView() as view:
        return diagnose(
            sample,
            policies,
            replicas=args.replicas or len(sample.replicas) or DEFAULT_REPLICAS,
            rate=args.rate,
            seed=args.seed,
            settings=simulation_settings(args),
            warmup_share=warmup,
            progress=view.update,
        )


def _say(message: str, code: int) -> int:
    print(f"warmroute diagnose: {message}", file=sys.stderr)
    return code
