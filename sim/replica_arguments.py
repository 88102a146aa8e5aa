"""Arguments about simulated replicas, and what they make: their settings, step time and KV transfers."""

import argparse
from collections.abc import Callable

from replica.contract.roofline.gpus import GPUS
from replica.contract.roofline.model_shapes import MODEL_SHAPES
from replica.contract.roofline.precisions import PRECISIONS
from replica.contract.roofline.roofline import Efficiency, RooflineStepTime
from sim.command_arguments import add_count, parsed, whole_number
from sim.fleet_change import FleetChange
from sim.given_options import refuse_given
from sim.simulated_replica import ReplicaSettings
from sim.step_time.presets import PRESET_BATCHED_TOKENS, PRESETS
from sim.step_time.step_time import StepTime
from sim.two_pools import KvMoves

DEFAULT_CAPACITY = 3_000_000
ROOFLINE_BATCHED_TOKENS = 8_192


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
    says = f"KV tokens one replica holds (default {DEFAULT_CAPACITY:,}; with --model what fits the GPU)"
    add_count(group, "--capacity", says, unit="TOKENS")
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
        type=parsed(Efficiency.parse),
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
    add_count(group, "--gpus", "with --model: GPUs per replica, tensor parallel", default=1)
    add_count(group, "--max-running", "requests in a replica's batch at once", default=128)
    group.add_argument(
        "--unlike",
        type=parsed(_unlike),
        action="append",
        default=[],
        metavar="REPLICA:KEY=VALUE[,KEY=VALUE…]",
        help="a replica, counted from 0, that is not like the others: slowdown, capacity, max_running; "
        "such as 3:slowdown=2.5",
    )
    group.add_argument(
        "--change",
        type=parsed(FleetChange.parse),
        action="append",
        default=[],
        metavar="SECONDS:KIND:REPLICA",
        help="something that happens: fail, restart, join, drain or resume; such as 600:fail:3",
    )
    says = "N more replicas that answer; --replicas compute long prompts for them"
    add_count(group, "--decode-pool", says)
    group.add_argument(
        "--kv-pull",
        action="store_true",
        help="replicas pull prefixes that others hold, where the router finds that cheaper",
    )
    group.add_argument(
        "--transfer",
        type=parsed(_transfer),
        metavar="MS:US_PER_TOKEN",
        help="what moving KV takes, with --decode-pool or --kv-pull; default 26:4.3",
    )


def replica_settings(args: argparse.Namespace) -> tuple[ReplicaSettings, StepTime]:
    """What each replica holds, and how long its steps take. Raises ValueError."""
    if args.model is None:
        refuse_given(
            args,
            ("--efficiency", "--gpu", "--precision", "--gpus"),
            "without effect: give --model MODEL, too",
        )
    else:
        refuse_given(args, ("--step-time",), "and --model both say how long a step takes; give one of them")
    if args.cache != "radix":
        refuse_given(args, ("--eviction",), "without effect: give --cache radix, too")
    step_time, capacity, batched = _step_time(args)
    settings = ReplicaSettings(
        capacity_tokens=args.capacity or capacity,
        cache=args.cache,
        eviction=args.eviction,
        max_running=args.max_running,
        max_batched_tokens=max(args.max_running, batched),
    )
    return settings, step_time


def kv_moves(args: argparse.Namespace) -> KvMoves | None:
    """How KV moves between replicas; ``None`` where it does not. Raises ValueError."""
    if args.decode_pool is None and not args.kv_pull:
        if args.transfer is not None:
            raise ValueError("--transfer is about KV that moves; give --decode-pool N or --kv-pull, too")
        return None
    times = args.transfer or ()
    return KvMoves(args.decode_pool or 0, *times)


def described_step_time(args: argparse.Namespace) -> str:
    """For titles."""
    if args.model is None:
        return str(args.step_time)
    return f"{args.model} {args.precision} on {args.gpus} x {args.gpu}"


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
