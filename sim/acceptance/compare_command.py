"""``warmroute compare``: may traffic move to a quantized or upgraded replica? Answers and times of both."""

import argparse
import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from sim.acceptance.token_answers import AskSettings, TokenAnswer, token_answers
from sim.acceptance.verdict import Rule, Verdict, verdict
from sim.command_arguments import add_api_key_argument, add_count, add_served_model, number, server_url
from sim.command_output import complain, print_json
from sim.diagnose.request_log import read_request_log
from sim.estimates import Estimate
from sim.first_model import Unreachable, first_model
from sim.progress_view import ProgressView
from sim.results_table import print_whole, table_console
from sim.workload.text_sessions import is_text_sessions, read_text_sessions
from sim.workload.trace import TraceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    rule = Rule()
    parser.add_argument(
        "prompts",
        metavar="PROMPTS",
        help="request bodies, or a request log with bodies, one JSON object per line; or recorded "
        "conversations",
    )
    for name, what in (
        ("baseline", "the server that has the traffic"),
        ("candidate", "the one that shall have it"),
    ):
        parser.add_argument(f"--{name}", type=server_url, required=True, metavar="URL", help=what)
    add_served_model(parser, "--baseline-model")
    add_served_model(parser, "--candidate-model")
    add_count(parser, "--requests", "only the first N prompts", least=2)
    add_count(parser, "--output-tokens", "of each answer", default=32)
    says = "requests at once: batches change what is computed, so the noise is measured under load, too"
    add_count(parser, "--concurrency", says, default=8)
    add_api_key_argument(parser, "the API key of both servers")
    group = parser.add_argument_group("the rule, fixed before the run")
    for name, what in (
        ("most-flips", "more answers that differ anywhere, as a share"),
        ("most-mismatches", "more top tokens that differ, as a share of the positions compared"),
        ("most-kl", "more KL divergence, in nats"),
        ("most-slower", "longer TTFT, as a share"),
    ):
        default = getattr(rule, name.replace("-", "_"))
        group.add_argument(
            f"--{name}",
            type=number(0.0),
            default=default,
            metavar="X",
            help=f"{what} (default {default:g})",
        )
    parser.add_argument("--require", action="store_true", help="end with 1 unless the candidate is accepted")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 1 no answers, or ``--require`` and not accepted, 2 what was given is wrong."""
    try:
        bodies = read_bodies(args.prompts, args.requests)
    except TraceError as error:
        return complain("compare", error, 2)
    rule = Rule(args.most_flips, args.most_mismatches, args.most_kl, args.most_slower)
    console = table_console()
    if not args.json:
        for line in rule.lines():
            console.print(line, soft_wrap=True, markup=False)
    try:
        with ProgressView() as view:
            baseline, candidate, again = asyncio.run(_three_runs(args, bodies, view.update))
        made = verdict(baseline, candidate, again, rule)
    except (Unreachable, ValueError) as error:
        return complain("compare", error, 1)
    if args.json:
        print_json(made.json_object())
    else:
        _print(console, made)
    return 1 if args.require and made.word != "accepted" else 0


def read_bodies(path: str, requests: int | None) -> list[Mapping[str, Any]]:
    """The prompts in ``path``. Raises ``TraceError``."""
    if is_text_sessions(Path(path)):
        text = read_text_sessions(path, requests=requests)
        return [{"messages": text.messages(number)} for number in range(len(text.trace.requests))]
    rows = read_request_log(path, requests=requests)
    bodies = [
        row.body for row in rows if row.body is not None and ("messages" in row.body or "prompt" in row.body)
    ]
    if len(bodies) < 2:
        raise TraceError(
            f"{path}: {len(bodies)} rows with messages or a prompt; expected at least 2 to compare"
        )
    return bodies


async def _three_runs(
    args: argparse.Namespace,
    bodies: Sequence[Mapping[str, Any]],
    progress: Callable[[str, int, int], None],
) -> list[list[TokenAnswer]]:
    """The baseline, the candidate, the baseline again; one after the other, for they may share a machine."""
    models = [
        args.baseline_model or (await first_model(args.baseline, args.headers)).name,
        args.candidate_model or (await first_model(args.candidate, args.headers)).name,
    ]
    runs = []
    for name, url, model in (
        ("baseline", args.baseline, models[0]),
        ("candidate", args.candidate, models[1]),
        ("baseline again", args.baseline, models[0]),
    ):
        settings = AskSettings(model, args.output_tokens, args.concurrency, headers=args.headers)

        def done(count: int, name: str = name) -> None:
            progress(name, count, len(bodies))

        runs.append(await token_answers(url, bodies, settings, done))
    return runs


def _print(console: Console, made: Verdict) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column, side in (
        ("", "left"),
        ("baseline\nagainst itself", "right"),
        ("candidate\nagainst baseline", "right"),
        ("difference\npaired, 95%", "right"),
        ("allowed", "right"),
        ("", "left"),
    ):
        table.add_column(column, justify="left" if side == "left" else "right", no_wrap=True)
    for one in made.measures:
        table.add_row(
            one.name,
            _shown(one.noise),
            _shown(one.candidate),
            _shown(one.difference, sign="+"),
            f"{one.limit:+.3f}",
            one.word,
        )
    print_whole(console, table)
    if any(made.errors):
        console.print(
            f"errors: baseline {made.errors[0]}, candidate {made.errors[1]}, baseline again {made.errors[2]}"
        )
    console.print(f"{made.word.upper()} on {made.prompts:,} prompts.")
    if made.word == "undecided":
        console.print("More prompts make the intervals narrower.")


def _shown(made: Estimate | None, sign: str = "") -> str:
    if made is None:
        return "-"
    text = f"{made.mean:{sign}.4f}"
    return text if made.half_width is None else f"{text} ±{made.half_width:.4f}"
