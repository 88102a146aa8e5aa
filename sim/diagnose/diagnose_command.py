"""``warmroute diagnose``: why the hit rate is what it is, token by token."""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

from router.config import ModelConfig
from sim.command_arguments import (
    add_rate_argument,
    add_sample_arguments,
    number,
    refuse_misfits,
    server_url,
)
from sim.command_output import complain, print_json
from sim.diagnose.diagnosis import Diagnosis, diagnose
from sim.diagnose.live_router import LiveRouter, RouterError, ask_router, explained, router_report
from sim.diagnose.metrics_page import EngineCounters, MetricsError, read_counters
from sim.diagnose.periods import period_of
from sim.diagnose.periods_report import change_report, counters_report, period_of_log
from sim.diagnose.report import DiagnosisReport, json_object, report
from sim.diagnose.report_view import html_page, print_report
from sim.diagnose.sample import open_sample
from sim.given_options import note_given, refuse_given
from sim.output_file import not_written, require_writable
from sim.progress_view import ProgressView
from sim.replica_arguments import add_replica_arguments
from sim.results_table import table_console
from sim.simulate_arguments import add_fleet_arguments, policy_kinds, simulation_settings
from sim.trace_remarks import tell_remarks

DEFAULT_REPLICAS = 8
DEFAULT_WARMUP = 0.25
DEFAULT_DOLLARS_PER_HOUR = 2.5
ASSUMED = (
    "no log tells them; give --capacity TOKENS (vLLM prints it at its start: GPU KV cache size), --url of a "
    "router whose replicas tell it, or --model and --gpu"
)
ASSUMED_BY_ROUTER = (
    "by the router, whose replicas do not all tell theirs (index.default_capacity_tokens); give --capacity "
    "TOKENS"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    note_given(parser)
    parser.add_argument(
        "file",
        nargs="?",
        metavar="FILE",
        help="a request log or OpenAI request bodies, one JSON object per line; or any trace that "
        "simulate takes",
    )
    parser.add_argument(
        "--url",
        type=server_url,
        metavar="ADMIN_URL",
        help="a running router's admin port: what it has seen; with FILE as many replicas of its capacity "
        "are simulated, and it is asked where it would send the latest prompts",
    )
    parser.add_argument(
        "--metrics",
        nargs="+",
        metavar="PAGE",
        help="saved /metrics pages of replicas or the router: two for one period; four, or three whose "
        "middle one counts twice, for two periods, whose TTFT is compared",
    )
    parser.add_argument(
        "--before", metavar="FILE", help="with FILE: the log of an earlier period, to compare it with"
    )
    parser.add_argument(
        "--policy",
        type=policy_kinds,
        default="predicted_finish",
        metavar="KIND[,KIND…]",
        help="policies to simulate; the first stands for the fleet where the log does not tell where "
        "requests went (default %(default)s)",
    )
    add_rate_argument(parser)
    parser.add_argument(
        "--dollars-per-hour",
        type=number(0.0),
        default=DEFAULT_DOLLARS_PER_HOUR,
        metavar="X",
        help="price of one replica (default %(default)g)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="FOLDER",
        help="a Hugging Face folder, or its tokenizer.json: prompts are read token by token, as the engine "
        "does (extra: exact)",
    )
    parser.add_argument(
        "--chat-template", metavar="FILE", help="with --tokenizer: instead of the folder's own"
    )
    parser.add_argument("--html", metavar="FILE", help="write the report as one HTML file, too")
    add_sample_arguments(
        parser, warmup=None, warmup_says=f"default {DEFAULT_WARMUP:g}, or 0 for prompts without times"
    )
    add_replica_arguments(
        parser.add_argument_group("replicas"),
        replicas=None,
        replicas_say=f"default: as many as the log or the router names, else {DEFAULT_REPLICAS}",
    )
    add_fleet_arguments(parser.add_argument_group("routers and what goes between"))


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 1 no router answers or a file cannot be written, 2 what was given is wrong."""
    try:
        _check(args)
        periods = _periods(args.metrics or ())
        made, written = _reported(args, periods)
    except RouterError as error:
        return complain("diagnose", error, 1)
    except ValueError as error:
        return complain("diagnose", error, 2)
    if args.json:
        print_json(made)
    else:
        print_report(written, table_console())
    if args.html is not None:
        try:
            Path(args.html).write_text(html_page(written), encoding="utf-8")
        except OSError as error:
            return complain("diagnose", not_written("--html", args.html, error), 1)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.chat_template is not None and args.tokenizer is None:
        raise ValueError("--chat-template goes with --tokenizer FOLDER")
    if args.before is not None and args.file is None:
        raise ValueError("--before is compared with FILE; give it, too")
    if args.file is None and args.url is None and args.metrics is None:
        raise ValueError("nothing to look at; give FILE, --url ADMIN_URL or --metrics PAGE PAGE")
    if args.file is None:
        used = {"--url", "--metrics", "--html", "--json"}
        refuse_given(args, args.given - used, "without effect: nothing is simulated without FILE")
    if args.html is not None:
        require_writable("--html", args.html)


def _periods(pages: list[str] | tuple[()]) -> list[EngineCounters]:
    """What was counted in each of no, one or two periods. Raises ``MetricsError``."""
    if not pages:
        return []
    if len(pages) not in (2, 3, 4):
        raise MetricsError(
            f"--metrics has {len(pages)} pages; expected two, or three or four for two periods"
        )
    read = [read_counters(page) for page in pages]
    pairs = [(0, 1)] if len(pages) == 2 else [(0, 1), (len(pages) - 2, len(pages) - 1)]
    return [read[last].since(read[first], f"{pages[first]} to {pages[last]}") for first, last in pairs]


def _reported(
    args: argparse.Namespace, periods: list[EngineCounters]
) -> tuple[dict[str, Any], DiagnosisReport]:
    """The report as JSON and for people."""
    router = None if args.url is None else ask_router(args.url)
    if args.file is None:
        made = _without_prompts(router, periods)
        return made.json_object(), made
    if args.before is not None:
        return _compared(args, router, periods)
    if len(periods) == 2:
        raise MetricsError("--metrics with two periods and FILE: give the first period's log with --before")
    diagnosis = _diagnosed(args, args.file, router, periods[0] if periods else None)
    made = report(diagnosis, args.dollars_per_hour)
    found = json_object(diagnosis, args.dollars_per_hour)
    if router is not None:
        seen = router_report(router)
        asked = explained(router, diagnosis)
        found["router"] = seen.json_object()
        made = replace(
            made,
            tables=(*made.tables, *seen.tables),
            findings=(*made.findings, *seen.findings, *asked),
        )
    return found, made


def _without_prompts(router: LiveRouter | None, periods: list[EngineCounters]) -> DiagnosisReport:
    if router is not None:
        return router_report(router)
    if len(periods) == 1:
        return counters_report(periods[0])
    first, second = (period_of(counters) for counters in periods)
    if first is None or second is None:
        raise MetricsError("--metrics: no request between two pages of a period; take them further apart")
    return change_report(first, second, None)


def _compared(
    args: argparse.Namespace, router: LiveRouter | None, periods: list[EngineCounters]
) -> tuple[dict[str, Any], DiagnosisReport]:
    if len(periods) == 1:
        raise MetricsError(
            "--metrics has one period, --before makes two; expected three or four pages, or none"
        )
    both = [_diagnosed(args, file, router, None) for file in (args.before, args.file)]
    first, second = (
        period_of_log(one, counters) for one, counters in zip(both, periods or (None, None), strict=True)
    )
    made = change_report(first, second, (both[0].sample, both[1].sample))
    found = made.json_object()
    found["before"], found["after"] = (json_object(one, args.dollars_per_hour) for one in both)
    return found, made


def _diagnosed(
    args: argparse.Namespace, file: str, router: LiveRouter | None, counters: EngineCounters | None
) -> Diagnosis:
    sample = open_sample(
        file,
        block_tokens=args.block_size,
        requests=args.requests,
        seed=args.seed,
        tokenizer=None
        if args.tokenizer is None
        else ModelConfig(tokenizer=args.tokenizer, chat_template=args.chat_template),
    )
    refuse_misfits(args, sample.trace)
    tell_remarks(sample.trace)
    settings = simulation_settings(argparse.Namespace(**{**vars(args), "warmup": DEFAULT_WARMUP}))
    replicas = args.replicas or len(sample.replicas) or DEFAULT_REPLICAS
    assumed = ASSUMED if args.capacity is None and args.model is None else ""
    if router is not None:
        if args.capacity is None:
            assumed = "" if router.capacities_told else ASSUMED_BY_ROUTER
            settings = replace(
                settings,
                replica=replace(settings.replica, capacity_tokens=min(router.capacities)),
            )
        replicas = args.replicas or len(router.replicas)
    warmup = args.warmup
    if warmup is None:  # a file of prompts without times is looked at whole
        warmup = 0.0 if sample.words and not sample.timed else DEFAULT_WARMUP
    with ProgressView() as view:
        return diagnose(
            sample,
            args.policy,
            replicas=replicas,
            rate=args.rate,
            seed=args.seed,
            settings=settings,
            warmup_share=warmup,
            measured_share=None if counters is None else counters.hit_share,
            assumed=assumed,
            progress=view.update,
        )
