"""``warmroute replay``: a trace sent to a running router; the figures of ``simulate``, from real answers."""

import argparse
import asyncio
import secrets

from sim.command_arguments import (
    add_api_key_argument,
    add_count,
    add_factor,
    add_rate_argument,
    add_served_model,
    add_trace_arguments,
    number,
    refuse_misfits,
    server_url,
    slo_of,
    traffic,
)
from sim.command_output import complain, print_json
from sim.first_model import Unreachable, first_model
from sim.given_options import refuse_given
from sim.progress_view import ProgressView
from sim.replay import Replay, ReplaySettings, prompt_scale, replay
from sim.results import CLUMPED_LIMIT
from sim.results_table import above_ideal, client_warning, results_table, table_console
from sim.trace_remarks import tell_remarks
from sim.workload.sources import open_text_or_trace
from sim.workload.trace import Trace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    parser.add_argument(
        "--url",
        type=server_url,
        required=True,
        help="the router's (or a replica's) public address, http://HOST:PORT",
    )
    add_api_key_argument(parser, "a key of the router's public port")
    add_trace_arguments(parser)
    add_rate_argument(parser, name="--speed")
    add_served_model(parser)
    says = "characters of made-up text per token of the trace"
    add_factor(parser, "--chars-per-token", says, default=4.0)
    add_count(
        parser,
        "--max-prompt-tokens",
        "for small models: shorten all prompts in proportion until the longest has N tokens; recorded "
        "conversations end before the first longer prompt instead",
    )
    add_count(parser, "--max-output-tokens", "ask for at most N tokens")
    parser.add_argument(
        "--ignore-eos",
        action="store_true",
        help="ask for exactly the recorded output length, if the server can",
    )
    says = "do not send what is due while N are in flight; it counts as an error (default: no limit)"
    add_count(parser, "--max-in-flight", says)
    parser.add_argument(
        "--cold-prefill-us",
        type=number(0.0),
        metavar="US",
        help="cold prefill per token for the SLO (default: the fastest tenth of this run's cold prompts)",
    )
    parser.add_argument(
        "--salt", help="makes prompts differ from those of other runs (default: random, new for each run)"
    )
    parser.add_argument(
        "--label", default="replay", help="name of this run in table and JSON (default %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command. 0 done, 1 no request succeeded, 2 the arguments or the trace are wrong."""
    try:
        trace, text = open_text_or_trace(
            args.trace, block_tokens=args.block_size, requests=args.requests, seed=args.seed
        )
        if text is not None:
            text = text.up_to(args.max_prompt_tokens)
            trace = text.trace
            says = f"without effect: {trace.name} has words of its own"
            refuse_given(args, ("--chars-per-token",), says)
        refuse_misfits(args, trace)
    except ValueError as error:
        return complain("replay", error, 2)
    try:
        model = args.model or asyncio.run(first_model(args.url, args.headers)).name
    except Unreachable as error:
        return complain("replay", error, 1)
    tell_remarks(trace)
    settings = ReplaySettings(
        url=args.url,
        headers=args.headers,
        model=model,
        salt=args.salt or secrets.token_hex(4),
        speed=args.speed,
        seed=args.seed,
        characters_per_token=args.chars_per_token,
        max_prompt_tokens=args.max_prompt_tokens,
        max_output_tokens=args.max_output_tokens,
        ignore_eos=args.ignore_eos,
        mean_think_s=args.think,
        max_in_flight=args.max_in_flight,
        slo=slo_of(args),
        warmup_share=args.warmup,
        cold_prefill_us=args.cold_prefill_us,
        label=args.label,
    )
    with ProgressView() as view:
        done = asyncio.run(replay(trace, settings, text=text, progress=view.update))
    if args.json:
        run_id = {"salt": settings.salt, "seed": settings.seed}
        print_json([done.result.json_object() | run_id])
    else:
        _print_table(args, trace, settings, done)
    errors, requests = done.result.errors, done.result.requests
    if 2 * errors >= requests:  # figures of the few that succeeded say nothing about the fleet
        kinds = ", ".join(f"{kind} ({count})" for kind, count in done.result.error_kinds)
        failed = "no request succeeded" if errors == requests else f"{errors} of {requests} requests failed"
        hint = (
            "; prompts may be too long for the model, see --max-prompt-tokens"
            if "status 400" in kinds
            else ""
        )
        return complain("replay", f"{failed}: {kinds}{hint}", 1)
    return 0


def _print_table(args: argparse.Namespace, trace: Trace, settings: ReplaySettings, done: Replay) -> None:
    result = done.result
    lines = [
        f"{traffic(trace, args.speed)} to {args.url} ({settings.model}), "
        f"{result.wall_s:.1f} s, seed {settings.seed}, salt {settings.salt}",
        f"{_span(trace)}blocks of {trace.block_tokens} tokens",
        f"measured: the last {result.requests:,} (the first {args.warmup:.0%} of the time warms the caches)"
        + (
            f"; one infinite cache would have cached {result.ideal_cached_share:.3f} of prompt tokens"
            if result.ideal_cached_share is not None
            else ""
        ),
    ]
    if above_ideal(result):
        lines.append(
            "more than that was cached: replicas count what the chat template repeats and what another run "
            "left, too; no share of the ideal is shown"
        )
    scale = prompt_scale(trace, settings.max_prompt_tokens)
    if scale < 1.0:
        lines.append(f"prompts shortened to {scale:.2%} of their length")
    console = table_console()
    for line in lines:
        console.print(line, soft_wrap=True, markup=False)
    console.print(results_table([result], console))
    console.print(
        f"in SLO: TTFT within {args.slo_ttft_ms:g} ms + {done.cold_prefill_us:.1f} µs a prompt token "
        f"({'as given' if args.cold_prefill_us is not None else 'the fastest tenth of this run'}), decoding "
        f"within 1 s + {args.slo_tpot_ms:g} ms a token; TTFT in SLO: the first alone. Requests were sent at "
        "most "
        f"{1e3 * (result.send_lag_p99_s or 0.0):.1f} ms late (p99); the sender used "
        f"{result.client_cpu_share or 0.0:.0%} of its core: its own ceiling is about "
        f"{result.client_ceiling_per_s or 0.0:,.0f} requests a second.",
        soft_wrap=True,
    )
    if result.tokens_per_event is not None:
        console.print(f"{result.tokens_per_event:.2f} tokens came in an event.")
    if (result.clumped_share or 0.0) > CLUMPED_LIMIT:
        console.print(
            f"CLUMPED: {result.clumped_share:.0%} of events came in one piece with the one before: something "
            "on the way collects them, or the replica sends them so. Times per token are the buffer's",
            soft_wrap=True,
        )
    if warning := client_warning([result]):
        console.print(warning, soft_wrap=True)
    for kind, count in result.error_kinds:
        console.print(f"{count} x {kind}", soft_wrap=True, markup=False)
    if done.without_usage:
        console.print(
            f"{done.without_usage} answers told no usage: they count as uncached and have no TPOT",
            soft_wrap=True,
        )


def _span(trace: Trace) -> str:
    """How long the arrivals take as recorded: a trace in the wrong unit shows by it."""
    times = [one.timestamp_ms for one in trace.requests if one.timestamp_ms is not None]
    return f"{(max(times) - min(times)) / 1e3:,.1f} s of arrivals as recorded, " if times else ""
