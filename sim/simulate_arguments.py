"""The arguments of ``warmroute simulate``, and the settings they make."""

import argparse
from dataclasses import replace

from sim.command_arguments import (
    add_count,
    add_rate_argument,
    add_trace_arguments,
    number,
    parsed,
    slo_of,
)
from sim.contender import CONTENDERS, names
from sim.given_options import refuse_given
from sim.kv_event_feed import KvEventSettings
from sim.replica_arguments import add_replica_arguments, kv_moves, replica_settings
from sim.simulation_settings import SimulationSettings
from sim.workload.arrival_process import ArrivalProcess

DEFAULT_POLICIES = "round_robin,least_loaded,power_of_two,prefix_affinity,predicted_finish"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """All of them."""
    add_trace_arguments(parser)
    parser.add_argument(
        "--policy",
        type=policy_kinds,
        default=DEFAULT_POLICIES,
        metavar="KIND[,KIND…]",
        help="policies to compare, in this order: the router's own, other routers' rules such as "
        "sglang_cache_aware, or the bound pooled_cache (default %(default)s)",
    )
    add_rate_argument(parser)
    parser.add_argument(
        "--arrivals",
        type=parsed(ArrivalProcess.parse),
        metavar="PROCESS",
        help="timed traces: other times at the same mean rate: poisson, or gamma:VARIATION (3: bursts)",
    )
    _add_modes(parser.add_argument_group("other things to do"))
    add_replica_arguments(parser.add_argument_group("replicas"))
    add_fleet_arguments(parser.add_argument_group("routers and what goes between"))


def policy_kinds(text: str) -> list[str]:
    """An argparse type: who is compared, in order."""
    kinds = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = [kind for kind in kinds if kind not in CONTENDERS]
    if unknown or not kinds:
        what = f"unknown policy {', '.join(unknown)}" if unknown else "no policy given"
        raise argparse.ArgumentTypeError(f"{text}: {what}; expected one or more of {names()}")
    if twice := sorted({kind for kind in kinds if kinds.count(kind) > 1}):
        raise argparse.ArgumentTypeError(f"{text}: {', '.join(twice)} given twice; expected each once")
    return kinds


def _add_modes(group: argparse._ArgumentGroup) -> None:
    add_count(
        group,
        "--compare",
        "run every policy with so many seeds and compare them seed by seed, with 95%% intervals; the first "
        "policy is the reference",
        least=2,
        unit="SEEDS",
    )
    group.add_argument(
        "--rates",
        type=parsed(_rates),
        metavar="X[,X…]",
        help="with --compare: several loads instead of --rate",
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="with --compare: load against latency and goodput, as FILE.png and FILE.svg (extra: plot)",
    )
    add_count(
        group,
        "--explain",
        "with two policies: the N decisions of the first that the second would have made otherwise and that "
        "would have cost most, with every candidate's numbers",
    )
    group.add_argument(
        "--lesson",
        choices=("burst",),
        help="a worked lesson instead of a trace: one burst, four rules, then without reservations and with "
        "evictions told late; --explain N shows more decisions",
    )
    group.add_argument(
        "--fidelity",
        nargs="?",
        const="",
        metavar="FOLDER",
        help="check the simulator against measured runs of vLLM (default: two that come with the package)",
    )


def add_fleet_arguments(group: argparse._ArgumentGroup) -> None:
    """Routers, events, metrics, and the network."""
    group.add_argument(
        "--no-hold",
        action="store_true",
        help="predicted_finish sends at once, instead of keeping requests in the router, shortest prefill "
        "first, while their replica has enough to prefill",
    )
    group.add_argument(
        "--guard-caches",
        action="store_true",
        help="requests also wait in the router where running ones fill so much of the KV memory that hits "
        "are lost (hold.guard_caches)",
    )
    says = "so many routers side by side; without --peer-lag they do not hold"
    add_count(group, "--routers", says, default=1)
    group.add_argument(
        "--peer-lag",
        type=number(0.0),
        metavar="S",
        help="with --routers: each knows after S seconds what the others sent (default: never)",
    )
    group.add_argument(
        "--kv-events",
        type=number(0.0),
        metavar="S",
        help="replicas tell what their caches store and remove, S seconds late (default: they do not)",
    )
    group.add_argument(
        "--kv-removals",
        type=number(0.0),
        metavar="S",
        help="with --kv-events: removals are told S seconds late",
    )
    group.add_argument(
        "--kv-loss",
        type=number(0.0, most=1.0),
        default=0.0,
        metavar="SHARE",
        help="with --kv-events: share of event batches lost for good (default %(default)g)",
    )
    group.add_argument(
        "--tell-max-tokens",
        action="store_true",
        help="requests tell how long their answer will be",
    )
    group.add_argument(
        "--network-delay-ms",
        type=number(0.0),
        default=0.0,
        metavar="MS",
        help="one way, between router and replica (default %(default)g)",
    )
    group.add_argument(
        "--report-interval",
        type=number(0.0, above=True),
        default=2.0,
        metavar="S",
        help="seconds between two probes of a replica (default %(default)g)",
    )
    group.add_argument(
        "--report-lag",
        type=number(0.0),
        default=0.0,
        metavar="S",
        help="how old a replica's report is when the router has it (default %(default)g)",
    )


def simulation_settings(args: argparse.Namespace) -> SimulationSettings:
    """What the arguments ask for. Raises ValueError for what does not fit together."""
    replica, step_time = replica_settings(args)
    _check_fleet(args)
    events = None
    if args.kv_events is not None:
        events = KvEventSettings(args.kv_events, args.kv_removals, args.kv_loss, replayed=False)
    return SimulationSettings(
        replica=replica,
        unlike=tuple((index, replace(replica, **changes)) for index, changes in args.unlike),
        step_time=step_time,
        slo=slo_of(args),
        hold=not args.no_hold,
        guard_caches=args.guard_caches,
        network_delay_s=args.network_delay_ms / 1e3,
        report_interval_s=args.report_interval,
        report_lag_s=args.report_lag,
        warmup_share=args.warmup,
        mean_think_s=args.think,
        changes=tuple(args.change),
        routers=args.routers,
        peer_lag_s=args.peer_lag,
        kv_events=events,
        tell_max_tokens=args.tell_max_tokens,
        kv_moves=kv_moves(args),
    )


def _check_fleet(args: argparse.Namespace) -> None:
    if args.kv_events is None:
        refuse_given(args, ("--kv-removals", "--kv-loss"), "without effect: give --kv-events SECONDS, too")
    if args.routers == 1:
        refuse_given(args, ("--peer-lag",), "without effect: give --routers N, 2 or more, too")
    about_holding = ("--no-hold", "--guard-caches")
    if not any(CONTENDERS[kind].holds for kind in args.policy):
        kinds = ", ".join(args.policy)
        refuse_given(args, about_holding, f"without effect: under {kinds} no request is held in the router")
    if args.routers > 1 and args.peer_lag is None:
        refuse_given(args, about_holding, "without effect: --routers without --peer-lag do not hold")
    if args.no_hold:
        refuse_given(args, ("--guard-caches",), "without effect: --no-hold holds nothing in the router")


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 < rate < float("inf") for rate in rates):
        raise ValueError(f"{text!r}; expected numbers above 0 with commas between them, such as 1,2,2.5")
    return rates
