"""What caches would have had of a sample, per request: infinite, pooled, one per replica, simulated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from sim.bounds import InfiniteCache
from sim.contender import contender
from sim.diagnose.sample import Sample
from sim.reuse_distance import reuse_distances
from sim.simulate import Progress, run_once
from sim.simulation_settings import SimulationSettings
from sim.workload.arrivals import plan_arrivals
from sim.workload.trace import Trace, TraceRequest

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Replays:
    """Cached tokens by number of the request in the trace."""

    order: tuple[int, ...]
    """Requests in order of arrival (in the simulation, for conversations)."""
    sent_s: tuple[float, ...]
    ideal: tuple[int, ...]
    """One infinite cache that sees every request."""
    distances: tuple[tuple[int, ...], ...]
    """Per request, blocks that one cache must hold for each block that an infinite one has."""
    pooled: tuple[int, ...]
    """One LRU cache as large as the fleet's together."""
    simulated: dict[str, tuple[int, ...]]
    """By policy: the router's and the replicas' own code."""
    as_routed: tuple[int, ...] | None
    """One LRU cache per replica, each request where the log says it went; ``None``: the log does not say."""


def replays(
    sample: Sample,
    policies: Sequence[str],
    *,
    replicas: int,
    rate: float,
    seed: int,
    settings: SimulationSettings,
    progress: Progress | None = None,
) -> Replays:
    """Replay ``sample`` every way. Raises ValueError for an unknown policy."""
    trace = sample.trace
    simulated: dict[str, tuple[int, ...]] = {}
    sent_s: tuple[float, ...] = ()
    for policy in policies:
        cached, times = _simulated(trace, policy, replicas, rate, seed, settings, progress)
        simulated[policy] = cached
        sent_s = sent_s or times
    order = tuple(sorted(range(len(trace.requests)), key=lambda number: sent_s[number]))
    pool_tokens = sum(settings.replica_settings(replica).capacity_tokens for replica in range(replicas))
    distances = _in_order(order, lambda some: _distances(trace, some))
    return Replays(
        order=order,
        sent_s=sent_s,
        ideal=_ideal(trace, order),
        distances=distances,
        pooled=_held(distances, trace.block_tokens, pool_tokens),
        simulated=simulated,
        as_routed=_as_routed(sample, order, settings.replica.capacity_tokens),
    )


def _simulated(
    trace: Trace,
    policy: str,
    replicas: int,
    rate: float,
    seed: int,
    settings: SimulationSettings,
    progress: Progress | None,
) -> tuple[tuple[int, ...], tuple[float, ...]]:
    plan = plan_arrivals(trace, rate=rate, seed=seed, mean_think_s=settings.mean_think_s)
    outcomes = run_once(trace, plan, contender(policy), replicas, seed, settings, progress)
    place = {id(arrival.request): position for position, arrival in enumerate(plan)}
    by_request = [outcomes[place[id(request)]] for request in trace.requests]
    return (
        tuple(outcome.cached_tokens for outcome in by_request),
        tuple(outcome.sent_s for outcome in by_request),
    )


def _ideal(trace: Trace, order: Sequence[int]) -> tuple[int, ...]:
    cache = InfiniteCache(trace.block_tokens)
    requests = trace.requests
    return _in_order(
        order,
        lambda some: [cache.arrived(_stored(requests[k]), requests[k].prompt_tokens) for k in some],
    )


def _distances(trace: Trace, some: Sequence[int]) -> list[tuple[int, ...]]:
    prompts = [(_stored(trace.requests[k]), trace.requests[k].prompt_tokens) for k in some]
    return list(reuse_distances(prompts, trace.block_tokens))


def _stored(request: TraceRequest) -> tuple[int, ...]:
    """The blocks of a prompt and of its answer: only the first may be hits, all stay in a cache."""
    return request.block_ids + request.output_block_ids


def _held(distances: Sequence[tuple[int, ...]], block_tokens: int, capacity_tokens: float) -> tuple[int, ...]:
    blocks = capacity_tokens // block_tokens
    return tuple(sum(one <= blocks for one in row) * block_tokens for row in distances)


def _as_routed(sample: Sample, order: Sequence[int], capacity_tokens: int) -> tuple[int, ...] | None:
    by_replica: dict[str, list[int]] = {}
    for number in order:
        name = sample.replica(number)
        if name is None:
            return None
        by_replica.setdefault(name, []).append(number)
    cached = [0] * len(order)
    for some in by_replica.values():
        rows = _held(_distances(sample.trace, some), sample.trace.block_tokens, capacity_tokens)
        for number, tokens in zip(some, rows, strict=True):
            cached[number] = tokens
    return tuple(cached)


def _in_order(order: Sequence[int], make: Callable[[Sequence[int]], list[Value]]) -> tuple[Value, ...]:
    """Values made in order of arrival, by number of the request."""
    by_number = dict(zip(order, make(order), strict=True))
    return tuple(by_number[number] for number in range(len(order)))
