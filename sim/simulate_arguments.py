"""The arguments of ``warmroute simulate``, and the settings they make."""

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import PRECISIONS
from replica.contract.roofline.roofline import Efficiency, RooflineStepTime
from sim.command_arguments import (
    add_rate_argument,
    add_trace_arguments,
    number,
    slo_of,
    whole_number,
)
from sim.contender import CONTENDERS, names
from sim.fleet_change import FleetChange
from sim.kv_event_feed import KvEventSettings
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from sim.step_time.presets import PRESET_BATCHED_TOKENS, PRESETS
from sim.step_time.step_time import StepTime
from sim.two_pools import KvMoves
from sim.workload.arrival_process import ArrivalProcess

DEFAULT_POLICIES = "round_robin,least_loaded,power_of_two,prefix_affinity,predicted_finish"
DEFAULT_CAPACITY = 3_000_000
ROOFLINE_BATCHED_TOKENS = 8_192

Parsed = TypeVar("Parsed")


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
        type=_parsed(ArrivalProcess.parse),
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
    return kinds


def _add_modes(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--compare",
        type=whole_number(2),
        metavar="SEEDS",
        help="run every policy with so many seeds and compare them seed by seed, with 95%% intervals; the "
        "first policy is the reference",
    )
    group.add_argument(
        "--rates",
        type=_parsed(_rates),
        metavar="X[,X…]",
        help="with --compare: several loads instead of --rate",
    )
    group.add_argument(
        "--plot",
        metavar="FILE",
        help="with --compare: load against latency and goodput, as FILE.png and FILE.svg (extra: plot)",
    )
    group.add_argument(
        "--explain",
        type=whole_number(1),
        metavar="N",
        help="with two policies: the N decisions of the first that the second would have made otherwise and "
        "that would have cost most, with every candidate's numbers",
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


def add_replica_arguments(
    group: argparse._ArgumentGroup,
    *,
    replicas: int | None = 8,
    replicas_say: str = "default %(default)s",
) -> None:
    """How many replicas, and what each can do.

    ``replicas_say``: of their default number, where the command finds it itself.
    """
    group.add_argument(
        "--replicas",
        type=whole_number(1),
        default=replicas,
        metavar="N",
        help=f"size of the fleet ({replicas_say})",
    )
    group.add_argument(
        "--capacity",
        type=whole_number(1),
        metavar="TOKENS",
        help=f"KV tokens one replica holds (default {DEFAULT_CAPACITY:,}; with --model what fits the GPU)",
    )
    group.add_argument(
        "--cache",
        choices=("blocks", "radix"),
        default="blocks",
        help="hash-chained blocks, or a radix tree (default %(default)s)",
    )
    group.add_argument(
        "--eviction",
        choices=("lru", "slru", "lfu", "tlru"),
        default="lru",
        help="with --cache radix: who leaves first (default %(default)s)",
    )
    group.add_argument(
        "--step-time",
        choices=sorted(PRESETS),
        default="emufleet",
        help="how long a step of a replica takes (default %(default)s)",
    )
    group.add_argument(
        "--model",
        choices=sorted(MODEL_SHAPES),
        metavar="MODEL",
        help=f"a roofline instead of --step-time: {', '.join(sorted(MODEL_SHAPES))}",
    )
    group.add_argument(
        "--efficiency",
        type=_parsed(Efficiency.parse),
        default=Efficiency(),
        metavar="KEY=VALUE[,KEY=VALUE…]",
        help="with --model: what your engine reaches, as --fidelity prints it for your measured run",
    )
    group.add_argument(
        "--gpu", choices=sorted(GPUS), default="h100", help="with --model (default %(default)s)"
    )
    group.add_argument(
        "--precision", choices=sorted(PRECISIONS), default="bf16", help="with --model (default %(default)s)"
    )
    group.add_argument(
        "--gpus",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="with --model: GPUs per replica, tensor parallel (default %(default)s)",
    )
    group.add_argument(
        "--max-running",
        type=whole_number(1),
        default=128,
        metavar="N",
        help="requests in a replica's batch at once (default %(default)s)",
    )
    group.add_argument(
        "--unlike",
        type=_parsed(_unlike),
        action="append",
        default=[],
        metavar="REPLICA:KEY=VALUE[,KEY=VALUE…]",
        help="a replica, counted from 0, that is not like the others: slowdown, capacity, max_running; "
        "such as 3:slowdown=2.5",
    )
    group.add_argument(
        "--change",
        type=_parsed(FleetChange.parse),
        action="append",
        default=[],
        metavar="SECONDS:KIND:REPLICA",
        help="something that happens: fail, restart, join, drain or resume; such as 600:fail:3",
    )
    group.add_argument(
        "--decode-pool",
        type=whole_number(1),
        metavar="N",
        help="N more replicas that answer; --replicas compute long prompts for them",
    )
    group.add_argument(
        "--kv-pull",
        action="store_true",
        help="replicas pull prefixes that others hold, where the router finds that cheaper",
    )
    group.add_argument(
        "--transfer",
        type=_parsed(_transfer),
        metavar="MS:US_PER_TOKEN",
        help="what moving KV takes, with --decode-pool or --kv-pull; default 26:4.3",
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
    group.add_argument(
        "--routers",
        type=whole_number(1),
        default=1,
        metavar="N",
        help="so many routers side by side; without --peer-lag they do not hold (default %(default)s)",
    )
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
    step_time, capacity, batched = _step_time(args)
    replica = ReplicaSettings(
        capacity_tokens=args.capacity or capacity,
        cache=args.cache,
        eviction=args.eviction,
        max_running=args.max_running,
        max_batched_tokens=max(args.max_running, batched),
    )
    if args.kv_events is None and (args.kv_removals is not None or args.kv_loss):
        raise ValueError("--kv-removals and --kv-loss are about KV events; give --kv-events SECONDS, too")
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
        kv_moves=_kv_moves(args),
    )


def _kv_moves(args: argparse.Namespace) -> KvMoves | None:
    if args.decode_pool is None and not args.kv_pull:
        if args.transfer is not None:
            raise ValueError("--transfer is about KV that moves; give --decode-pool N or --kv-pull, too")
        return None
    times = args.transfer or ()
    return KvMoves(args.decode_pool or 0, *times)


def _transfer(text: str) -> tuple[float, float]:
    """Seconds, and seconds per token."""
    fixed, _, per_token = text.partition(":")
    try:
        fixed_ms, token_us = float(fixed), float(per_token)
    except ValueError:
        fixed_ms, token_us = -1.0, 0.0
    if not 0.0 <= fixed_ms < 1e9 or not 0.0 < token_us < 1e9:
        raise ValueError(f"{text!r}; expected MILLISECONDS:MICROSECONDS_PER_TOKEN such as 26:4.3")
    return fixed_ms / 1e3, token_us / 1e6


def _step_time(args: argparse.Namespace) -> tuple[StepTime, int, int]:
    """The model, the KV tokens a replica has if none were given, and tokens per step."""
    if args.model is None:
        return PRESETS[args.step_time], DEFAULT_CAPACITY, PRESET_BATCHED_TOKENS[args.step_time]
    model = RooflineStepTime.of(
        args.model, args.gpu, args.precision, tensor_parallel=args.gpus, efficiency=args.efficiency
    )
    return model, model.kv_capacity_tokens(), ROOFLINE_BATCHED_TOKENS


def described_step_time(args: argparse.Namespace) -> str:
    """For titles."""
    if args.model is None:
        return str(args.step_time)
    return f"{args.model} {args.precision} on {args.gpus} x {args.gpu}"


def _parsed(parse: Callable[[str], Parsed]) -> Callable[[str], Parsed]:
    """An argparse type from a function that raises ValueError with a message."""

    def typed(text: str) -> Parsed:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    return typed


def _rates(text: str) -> tuple[float, ...]:
    try:
        rates = tuple(float(part) for part in text.split(","))
    except ValueError:
        rates = ()
    if not rates or not all(0.0 < rate < float("inf") for rate in rates):
        raise ValueError(f"{text!r}; expected numbers above 0 with commas between them, such as 1,2,2.5")
    return rates


_UNLIKE_KEYS: dict[str, tuple[str, Callable[[str], float]]] = {
    "slowdown": ("slowdown", float),
    "capacity": ("capacity_tokens", int),
    "max_running": ("max_running", int),
}


def _unlike(text: str) -> tuple[int, dict[str, float]]:
    index, _, rest = text.partition(":")
    changes: dict[str, float] = {}
    try:
        for part in rest.split(","):
            key, _, value = part.partition("=")
            name, parse = _UNLIKE_KEYS[key]
            changes[name] = parse(value)
            if not 0 < changes[name] < float("inf"):
                raise ValueError
        replica = int(index)
        if replica < 0:
            raise ValueError
    except (KeyError, ValueError):
        raise ValueError(
            f"{text!r}; expected REPLICA:KEY=VALUE with KEY one of {', '.join(_UNLIKE_KEYS)}, such as "
            "3:slowdown=2.5,capacity=300000"
        ) from None
    return replica, changes
