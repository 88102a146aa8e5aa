"""Argument types and arguments that several commands have in common."""

import argparse
import os
from collections.abc import Callable
from typing import TypeVar

from sim.given_options import note_given, refuse_given
from sim.results import Slo
from sim.workload.sources import SHIPPED_TRACE, made_up_names, open_trace
from sim.workload.trace import Trace

Arguments = argparse.ArgumentParser | argparse._ArgumentGroup
Parsed = TypeVar("Parsed")


def whole_number(least: int) -> Callable[[str], int]:
    """An argparse type: a whole number, ``least`` or more."""

    def parse(text: str) -> int:
        try:
            value = int(text.replace("_", "").replace(",", ""))
        except ValueError:
            value = least - 1
        if value < least:
            raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number, {least} or more")
        return value

    return parse


def whole_numbers(text: str) -> tuple[int, ...]:
    """An argparse type: whole numbers from 1 on, with commas between; each once."""
    return tuple(dict.fromkeys(map(whole_number(1), text.split(","))))


def number(least: float, *, above: bool = False, most: float = float("inf")) -> Callable[[str], float]:
    """An argparse type: a finite number from ``least`` (or ``above`` it) to ``most``."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = float("nan")
        if not (value > least if above else value >= least) or value > most or value == float("inf"):
            limits = f"{'above' if above else 'at least'} {least:g}"
            if most < float("inf"):
                limits += f" and at most {most:g}"
            raise argparse.ArgumentTypeError(f"{text!r}; expected a number, {limits}")
        return value

    return parse


def parsed(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """An argparse type from a function that raises ValueError with a message."""

    def typed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def server_url(text: str) -> str:
    """An argparse type: where a server listens."""
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"{text}: expected http://HOST:PORT or https://…")
    return text.rstrip("/")


def _bearer_from(variable: str) -> dict[str, str]:
    key = os.environ.get(variable)
    if not key:
        raise argparse.ArgumentTypeError(f"{variable}: no such environment variable, or it is empty")
    return {"authorization": f"Bearer {key}"}


def add_api_key_argument(parser: argparse.ArgumentParser, whose: str) -> None:
    """``--api-key-env``; ``args.headers`` are then sent with every request, or None."""
    parser.add_argument(
        "--api-key-env",
        dest="headers",
        type=_bearer_from,
        metavar="NAME",
        help=f"environment variable with {whose}",
    )


def add_count(
    parser: Arguments, name: str, says: str, *, default: int | None = None, least: int = 1, unit: str = "N"
) -> None:
    """``name``, a whole number, ``least`` or more; ``says`` what it counts."""
    if default is not None:
        says += " (default %(default)s)"
    parser.add_argument(name, type=whole_number(least), default=default, metavar=unit, help=says)


def add_factor(parser: Arguments, name: str, says: str, *, default: float) -> None:
    """``name``, a number above 0; ``says`` of what."""
    parser.add_argument(
        name, type=number(0.0, above=True), default=default, metavar="X", help=f"{says} (default %(default)g)"
    )


def add_served_model(parser: Arguments, name: str = "--model") -> None:
    """The model to ask a server for."""
    parser.add_argument(
        name, metavar="MODEL", help="model to ask for (default: the first that /v1/models names)"
    )


def add_rate_argument(parser: Arguments, *, name: str = "--rate", default: float = 1.0) -> None:
    """How fast requests come."""
    says = "timed traces: X times as fast as recorded; sessions: X start in a second"
    add_factor(parser, name, says, default=default)


def traffic(trace: Trace, rate: float) -> str:
    """For titles: what is sent, and how fast."""
    pace = f"{rate:g} sessions a second" if trace.in_sessions else f"{rate:g} times as fast"
    return f"{trace.name}, {pace}: {len(trace.requests):,} requests"


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Which requests, how many of them, and what is measured; ``args.given`` tells those given."""
    note_given(parser)
    parser.add_argument(
        "--trace",
        default=SHIPPED_TRACE,
        metavar="FILE",
        help=f"trace as JSON lines or Azure's CSV, plain or gzip; or {SHIPPED_TRACE} (1,000 requests of "
        f"Mooncake's conversation trace, in the package), or made up from the seed: {made_up_names()}; "
        "default %(default)s",
    )
    add_sample_arguments(parser)


def trace_of(args: argparse.Namespace, seed: int | None = None) -> Trace:
    """The trace that ``add_trace_arguments`` was told of, made from ``seed`` if given.

    Raises ``TraceError``, and ``ValueError`` where an argument does not fit it.
    """
    trace = open_trace(
        args.trace,
        block_tokens=args.block_size,
        requests=args.requests,
        seed=args.seed if seed is None else seed,
    )
    refuse_misfits(args, trace)
    return trace


def refuse_misfits(args: argparse.Namespace, trace: Trace) -> None:
    """Raise ``ValueError`` if ``--block-size`` or ``--think`` was given and says nothing of ``trace``."""
    if args.block_size not in (None, trace.block_tokens):
        raise ValueError(f"--block-size {args.block_size}: {trace.name} has blocks of {trace.block_tokens}")
    if not trace.in_sessions:
        refuse_given(args, ("--think",), f"without effect: {trace.name} has times, not sessions")


def add_sample_arguments(
    parser: argparse.ArgumentParser,
    *,
    warmup: float | None = 0.25,
    warmup_says: str = "default %(default)s",
) -> None:
    """How much of the requests, and what is measured.

    ``warmup_says``: of the default, where the command finds it itself.
    """
    says = "tokens per block id (default: the usual size that agrees with the lengths)"
    add_count(parser, "--block-size", says, unit="TOKENS")
    add_count(parser, "--requests", "only the first N requests of the trace")
    parser.add_argument("--seed", type=int, default=1, help="of everything random (default %(default)s)")
    parser.add_argument(
        "--think",
        type=number(0.0),
        default=1.0,
        metavar="S",
        help="mean pause before a turn, seconds, for session traces that tell none (default %(default)s)",
    )
    parser.add_argument(
        "--warmup",
        type=number(0.0, most=0.99),
        default=warmup,
        metavar="SHARE",
        help=f"share of the sending time that is not measured ({warmup_says})",
    )
    parser.add_argument(
        "--slo-ttft-ms",
        type=number(0.0, above=True),
        default=1000.0,
        metavar="MS",
        help="first token allowed this late, on top of the prompt's cold prefill (default %(default)g)",
    )
    parser.add_argument(
        "--slo-tpot-ms",
        type=number(0.0, above=True),
        default=50.0,
        metavar="MS",
        help="time per output token allowed (default %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON array instead of the table")


def slo_of(args: argparse.Namespace) -> Slo:
    """What ``add_sample_arguments`` was told of being in time."""
    return Slo(args.slo_ttft_ms, args.slo_tpot_ms)
