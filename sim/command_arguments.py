"""Argument types and arguments that several commands have in common."""

import argparse
import os
from collections.abc import Callable

from sim.results import Slo
from sim.workload.sources import SHIPPED_TRACE, made_up_names


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


def add_rate_argument(parser: argparse.ArgumentParser, *, default: float = 1.0) -> None:
    """How fast requests come."""
    parser.add_argument(
        "--rate",
        type=number(0.0, above=True),
        default=default,
        metavar="X",
        help="timed traces: X times as fast as recorded; sessions: X start in a second (default %(default)g)",
    )


def add_trace_arguments(parser: argparse.ArgumentParser) -> None:
    """Which requests, how many of them, and what is measured."""
    parser.add_argument(
        "--trace",
        default=SHIPPED_TRACE,
        metavar="FILE",
        help=f"trace as JSON lines or Azure's CSV, plain or gzip; or {SHIPPED_TRACE} (1,000 requests of "
        f"Mooncake's conversation trace, in the package), or made up from the seed: {made_up_names()}; "
        "default %(default)s",
    )
    add_sample_arguments(parser)


def add_sample_arguments(
    parser: argparse.ArgumentParser,
    *,
    warmup: float | None = 0.25,
    warmup_says: str = "default %(default)s",
) -> None:
    """How much of the requests, and what is measured.

    ``warmup_says``: of the default, where the command finds it itself.
    """
    parser.add_argument(
        "--block-size",
        type=whole_number(1),
        metavar="TOKENS",
        help="tokens per block id (default: the usual size that agrees with the lengths)",
    )
    parser.add_argument(
        "--requests", type=whole_number(1), metavar="N", help="only the first N requests of the trace"
    )
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
