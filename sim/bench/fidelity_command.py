"""``warmroute bench fidelity``: how near the simulator comes to our router before our replicas."""

import argparse
import sys
import tempfile
from itertools import combinations
from pathlib import Path

import orjson
import uvloop
from rich import box
from rich.table import Table

from sim.bench.http_fidelity import HttpFidelity, HttpFidelityPlan, http_fidelity
from sim.calibrate.calibrate_command import cost_keys
from sim.command_arguments import number, whole_number
from sim.demo.processes import ChildError
from sim.progress_view import ProgressView
from sim.results import Result
from sim.results_table import table_console
from sim.simulate_arguments import policy_kinds

CACHED_WITHIN = 0.01
TTFT_WITHIN = 0.10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's arguments."""
    plan = HttpFidelityPlan()
    parser.add_argument(
        "--model", default=plan.model, help="what the replicas serve: tiny, smollm2 (default %(default)s)"
    )
    parser.add_argument(
        "--policy",
        type=policy_kinds,
        default=",".join(plan.policies),
        metavar="KIND[,KIND…]",
        help="the router's policies to try (default %(default)s)",
    )
    for name, default, what in (
        ("replicas", plan.replicas, "replicas, each with one thread"),
        ("requests", plan.requests, "requests under each policy"),
        ("kv-tokens", plan.kv_tokens, "tokens that each replica's KV cache holds"),
        ("seed", plan.seed, "seed of the trace"),
    ):
        parser.add_argument(
            f"--{name}",
            type=whole_number(1),
            default=default,
            metavar="N",
            help=f"{what} (default %(default)s)",
        )
    parser.add_argument(
        "--load",
        type=number(0.0, above=True),
        default=plan.load,
        metavar="SHARE",
        help="of the replicas' time that the requests would take if nothing were cached (default "
        "%(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command: 0 measured, 1 it could not be."""
    plan = HttpFidelityPlan(
        model=args.model,
        replicas=args.replicas,
        requests=args.requests,
        load=args.load,
        kv_tokens=args.kv_tokens,
        seed=args.seed,
        policies=tuple(args.policy),
    )
    with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder:
        try:
            with ProgressView() as view:
                made = uvloop.run(http_fidelity(plan, Path(folder), view.update))
        except (ChildError, ValueError) as error:
            print(f"warmroute bench fidelity: {error}", file=sys.stderr)
            return 1
    if args.json:
        print(orjson.dumps(json_object(made), option=orjson.OPT_INDENT_2).decode())
    else:
        _print(made, plan)
    return 0


def json_object(made: HttpFidelity) -> dict[str, object]:
    """Every figure, and the three that are promised."""
    return {
        "cost": cost_keys(made.prefill, made.decode),
        "fit_errors": [error.mean for error in made.errors],
        "requests_per_s": made.rate,
        "live": [result.json_object() for result in made.live],
        "simulated": [result.json_object() for result in made.simulated],
        "cached_share_off": [_cached_off(*pair) for pair in _pairs(made)],
        "ttft_p50_off": [_ttft_off(*pair) for pair in _pairs(made)],
        "reversed": reversed_pairs(made),
    }


def reversed_pairs(made: HttpFidelity) -> list[tuple[str, str]]:
    """Policies whose median TTFT live differs by over ``TTFT_WITHIN``, and simulated the other way round."""
    found = []
    for (one, one_made), (other, other_made) in combinations(_pairs(made), 2):
        live = (one.ttft_s.p50 or 0.0, other.ttft_s.p50 or 0.0)
        simulated = (one_made.ttft_s.p50 or 0.0, other_made.ttft_s.p50 or 0.0)
        apart = max(live) > (1.0 + TTFT_WITHIN) * min(live)
        if apart and (live[0] - live[1]) * (simulated[0] - simulated[1]) < 0.0:
            found.append((one.policy, other.policy))
    return found


def _pairs(made: HttpFidelity) -> list[tuple[Result, Result]]:
    return list(zip(made.live, made.simulated, strict=True))


def _cached_off(live: Result, simulated: Result) -> float:
    return (simulated.cached_share or 0.0) - (live.cached_share or 0.0)


def _ttft_off(live: Result, simulated: Result) -> float | None:
    if not live.ttft_s.p50 or simulated.ttft_s.p50 is None:
        return None
    return simulated.ttft_s.p50 / live.ttft_s.p50 - 1.0


def _print(made: HttpFidelity, plan: HttpFidelityPlan) -> None:
    console = table_console()
    cost = ", ".join(f"{name} {value:g}" for name, value in cost_keys(made.prefill, made.decode).items())
    prefill_error, decode_error = made.errors
    console.print(
        f"{plan.replicas} replicas of {plan.model}, measured: {cost}; the fits are off by "
        f"{prefill_error.mean:.0%} and {decode_error.mean:.0%} in the mean",
        soft_wrap=True,
        markup=False,
    )
    console.print(
        f"{plan.requests} requests, {made.rate:.3g} a second, through our router over HTTP and simulated "
        "(errors of the simulation)",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy")
    for header in (
        f"cached share\n(within {100 * CACHED_WITHIN:.0f} point)",
        "",
        f"TTFT p50, ms\n(within {TTFT_WITHIN:.0%})",
        "",
        "TTFT mean, ms",
        "E2E mean, ms",
        "errors",
    ):
        table.add_column(header, justify="right")
    for live, simulated in _pairs(made):
        cached, ttft = _cached_off(live, simulated), _ttft_off(live, simulated)
        table.add_row(
            live.policy,
            f"{live.cached_share or 0.0:.3f} → {simulated.cached_share or 0.0:.3f}",
            f"{100 * cached:+.1f}" + ("" if abs(cached) <= CACHED_WITHIN else " !"),
            _milliseconds(live.ttft_s.p50, simulated.ttft_s.p50),
            "-" if ttft is None else f"{ttft:+.1%}" + ("" if abs(ttft) <= TTFT_WITHIN else " !"),
            _milliseconds(live.ttft_s.mean, simulated.ttft_s.mean),
            _milliseconds(live.e2e_s.mean, simulated.e2e_s.mean),
            f"{live.errors}",
        )
    console.print(table)
    wrong = reversed_pairs(made)
    if wrong:
        pairs = "; ".join(f"{one} and {other}" for one, other in wrong)
        console.print(f"order of policies by TTFT p50: NOT the same: {pairs}", soft_wrap=True)
    else:
        console.print(
            f"order of policies by TTFT p50: the same (those within {TTFT_WITHIN:.0%} of one another left "
            "aside)",
            soft_wrap=True,
        )


def _milliseconds(live_s: float | None, simulated_s: float | None) -> str:
    return f"{1e3 * (live_s or 0.0):,.1f} → {1e3 * (simulated_s or 0.0):,.1f}"
