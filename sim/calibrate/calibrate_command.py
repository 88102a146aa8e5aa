"""``warmroute calibrate``: a replica's prefill and decode cost, measured, as a piece of router config."""

import argparse
import asyncio
import secrets
import sys
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from replica.contract.cost_fit import FitError, fit_decode, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from sim.calibrate.cautions import cautions
from sim.calibrate.measure import CalibrationError, Measurements, MeasureSettings, measure
from sim.command_arguments import add_api_key_argument, add_count, add_served_model, server_url
from sim.command_output import complain, print_json
from sim.first_model import Unreachable, first_model, named_model
from sim.progress_view import ProgressView
from sim.results_table import table_console

DEFAULT_LONGEST = 16_384
FEW_REPEATS = 3
"""Below so many a median leaves nothing out."""
SPARE_TOKENS = 64
"""Of the context length, left for the template and the answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--url",
        type=server_url,
        required=True,
        help="a replica's address, http://HOST:PORT; it should be idle",
    )
    add_served_model(parser)
    add_count(
        parser,
        "--longest",
        f"longest prompt (default {DEFAULT_LONGEST}, or what the model takes)",
        least=16,
        unit="TOKENS",
    )
    add_count(parser, "--repeats", "per length", default=3)
    add_count(parser, "--most-sequences", "largest decode batch", default=32)
    add_count(parser, "--output-tokens", "of each stream whose decoding is timed", default=64, least=4)
    add_api_key_argument(parser, "the replica's API key")
    parser.add_argument("--json", action="store_true", help="print JSON: every point, the fit and its error")


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 1 the replica cannot be measured, 2 the arguments are wrong."""
    try:
        made = asyncio.run(_measured(args))
        prefill, prefill_error = fit_prefill(made.prefill)
        decode, decode_error = fit_decode(made.decode)
        doubts = cautions(prefill, prefill_error, decode, decode_error)
        if args.repeats < FEW_REPEATS:
            doubts.append(f"--repeats {args.repeats}: one disturbance is not told from a slow replica")
    except (Unreachable, CalibrationError, ValueError) as error:
        return complain("calibrate", error, 1)
    if args.json:
        found = _json(args.url, made, prefill, prefill_error, decode, decode_error) | {"cautions": doubts}
        print_json(found)
        return 0
    console = table_console()
    _print_prefill(console, made, prefill, prefill_error)
    _print_decode(console, made, decode, decode_error)
    for note in made.notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    for doubt in doubts:
        console.print(f"caution: {doubt}", soft_wrap=True, markup=False)
    print(fragment(args.url, prefill, decode))
    return 0


async def _measured(args: argparse.Namespace) -> Measurements:
    if args.model:
        served = await named_model(args.url, args.model, args.headers)
    else:
        served = await first_model(args.url, args.headers)
    if served.of_router:
        print(
            f"warmroute calibrate: caution: {args.url} is a router: this measures its fleet; "
            "give a replica's own address",
            file=sys.stderr,
        )
    longest = args.longest or DEFAULT_LONGEST
    if served.max_tokens is not None:
        longest = min(longest, max(16, served.max_tokens - SPARE_TOKENS))
    settings = MeasureSettings(
        url=args.url,
        model=served.name,
        salt=secrets.token_hex(8),
        longest_tokens=longest,
        repeats=args.repeats,
        most_sequences=args.most_sequences,
        output_tokens=args.output_tokens,
        headers=args.headers,
    )
    with ProgressView() as view:
        return await measure(settings, progress=view.update)


def fragment(url: str, prefill: PrefillCost, decode: DecodeCost) -> str:
    """The replica's entry in the router's config.

    >>> print(fragment("http://a:1", PrefillCost(0.004, 31e-6, 64_000.0), DecodeCost(0.008, 60e-6)))
    replicas:
      - url: http://a:1
        cost:
          prefill_fixed_ms: 4
          prefill_us_per_token: 31
          attention_tokens: 64000
          decode_step_ms: 8
          decode_us_per_sequence: 60
    """
    lines = ["replicas:", f"  - url: {url}", "    cost:"]
    lines += [f"      {name}: {value:g}" for name, value in cost_keys(prefill, decode).items()]
    return "\n".join(lines)


def cost_keys(prefill: PrefillCost, decode: DecodeCost) -> dict[str, float]:
    """The keys of ``cost`` in the router's config, with as many digits as a measurement can mean."""
    values = {
        "prefill_fixed_ms": 1e3 * prefill.fixed_s,
        "prefill_us_per_token": 1e6 * prefill.per_token_s,
        "attention_tokens": prefill.attention_tokens,
        "decode_step_ms": 1e3 * decode.fixed_s,
        "decode_us_per_sequence": 1e6 * decode.per_sequence_s,
    }
    return {name: float(f"{value:.4g}") for name, value in values.items()}


def _print_prefill(console: Console, made: Measurements, cost: PrefillCost, error: FitError) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("new tokens", "after cached", "first token ms", "fitted ms", "off"):
        table.add_column(column, justify="right")
    for point in made.prefill:
        fitted = cost.seconds(point.new_tokens, point.position)
        table.add_row(f"{point.new_tokens:,}", f"{point.position:,}", *_compared(point.seconds, fitted))
    console.print(table)
    console.print(
        f"prefill: {1e3 * cost.fixed_s:.2f} ms + {1e6 * cost.per_token_s:.2f} µs a token, twice that at "
        f"position {cost.attention_tokens:,.0f}; off by {error.mean:.1%} in the mean, {error.worst:.1%} at "
        "worst",
        soft_wrap=True,
    )


def _print_decode(console: Console, made: Measurements, cost: DecodeCost, error: FitError) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("sequences", "step ms", "fitted ms", "off"):
        table.add_column(column, justify="right")
    for point in made.decode:
        table.add_row(f"{point.sequences}", *_compared(point.seconds, cost.step_seconds(point.sequences)))
    console.print(table)
    console.print(
        f"decode: {1e3 * cost.fixed_s:.2f} ms a step + {1e6 * cost.per_sequence_s:.1f} µs a sequence; off by "
        f"{error.mean:.1%} in the mean, {error.worst:.1%} at worst",
        soft_wrap=True,
    )


def _compared(seconds: float, fitted: float) -> tuple[str, str, str]:
    return f"{1e3 * seconds:,.2f}", f"{1e3 * fitted:,.2f}", f"{fitted / seconds - 1.0:+.1%}"


def _json(
    url: str,
    made: Measurements,
    prefill: PrefillCost,
    prefill_error: FitError,
    decode: DecodeCost,
    decode_error: FitError,
) -> dict[str, Any]:
    return {
        "url": url,
        "cost": cost_keys(prefill, decode),
        "prefill_error": {"mean": prefill_error.mean, "worst": prefill_error.worst},
        "decode_error": {"mean": decode_error.mean, "worst": decode_error.worst},
        "prefill": [
            {"new_tokens": point.new_tokens, "cached_tokens": point.position, "ms": 1e3 * point.seconds}
            for point in made.prefill
        ],
        "decode": [{"sequences": point.sequences, "ms": 1e3 * point.seconds} for point in made.decode],
        "notes": list(made.notes),
    }
