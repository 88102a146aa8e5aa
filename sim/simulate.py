"""Runs a trace through the router's and the replica's own code under a virtual clock, policy by policy.

Every policy gets the same arrivals, the same replicas and a random generator of its own, all from one seed:
the same seed gives the same result, to the byte.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from replica.contract.kv_events import CacheEvent
from replica.scheduler import Scheduler
from router.routing.block_naming import BlockNaming
from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.prompt_blocks import TEXT_LAYOUT, Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from sim.bounds import ideal_cached_share
from sim.contender import Contender, contender, names
from sim.event_queue import EventQueue
from sim.kv_event_feed import KvEventFeed
from sim.outcome import Outcome
from sim.peer_link import PeerLink
from sim.perfect_knowledge import informed, true_costs
from sim.pooled_cache import PooledCache, PooledFinish
from sim.replica_row import CacheEventSink, ReplicaRow
from sim.results import Result, summarize, warmup_end_s
from sim.simulated_fleet import SimulatedFleet
from sim.simulated_replica import ReplicaEvents, ReplicaSettings
from sim.simulated_router import SimulatedRouter
from sim.simulation_settings import SimulationSettings
from sim.step_time.slowed import SlowedStepTime
from sim.step_time.step_time import cold_prefill_s
from sim.two_pools import PulledStepTime
from sim.workload.arrivals import Arrival, plan_arrivals
from sim.workload.trace import Trace

__all__ = ["Progress", "SimulationSettings", "build", "simulate"]

Progress = Callable[[str, int, int], None]
"""Called now and then with (policy, requests over, requests in all)."""

TEXT_TOKENS_PER_BYTE = 0.25
"""What a router takes text for until answers tell it better: ``Fleet``'s default."""
PROGRESS_EVERY_S = 10.0
"""Virtual seconds between two calls."""


def simulate(
    trace: Trace,
    policies: Sequence[str],
    *,
    replicas: int = 8,
    rate: float = 1.0,
    seed: int = 1,
    settings: SimulationSettings | None = None,
    progress: Progress | None = None,
) -> list[Result]:
    """One result per policy kind, in order.

    ``rate`` is how much faster than recorded a timed trace runs, or how many sessions start in a second.
    Raises ValueError for an unknown policy or a number that makes no sense.
    """
    settings = settings or SimulationSettings()
    _check(trace, policies, replicas, rate, settings)
    plan = plan_arrivals(trace, rate=rate, seed=seed, mean_think_s=settings.mean_think_s)
    results = []
    for policy in policies:
        outcomes = run_once(trace, plan, contender(policy), replicas, seed, settings, progress)
        results.append(result_of(policy, trace, plan, outcomes, replicas, settings))
    return results


def _check(
    trace: Trace, policies: Sequence[str], replicas: int, rate: float, settings: SimulationSettings
) -> None:
    for policy in policies:
        if contender(policy).pooled and settings.kv_moves is not None:
            raise ValueError(
                f"{policy} has one cache for all replicas: KV that moves between them is for others"
            )
    if not policies:
        raise ValueError(f"no policy given; expected one of {names()}")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; expected 1 or more")
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate}; expected a number above 0")
    if not trace.requests:
        raise ValueError(f"trace {trace.name} has no requests")
    for what, replica in (
        *(("change", change.replica) for change in settings.changes),
        *(("unlike", index) for index, _ in settings.unlike),
    ):
        if replica >= settings.all_replicas(replicas):
            count = settings.all_replicas(replicas)
            raise ValueError(f"{what} of replica {replica}: there are {count}, counted from 0")
    joins = {change.replica: change.at_s for change in settings.changes if change.kind == "join"}
    if len(joins) < sum(change.kind == "join" for change in settings.changes):
        raise ValueError("a replica joins twice; expected each once")
    for change in settings.changes:
        if change.kind in ("drain", "resume") and change.at_s < joins.get(change.replica, 0.0):
            raise ValueError(f"{change.kind} of replica {change.replica} before it joins")


def run_once(
    trace: Trace,
    plan: Sequence[Arrival],
    one: Contender,
    replicas: int,
    seed: int,
    settings: SimulationSettings,
    progress: Progress | None = None,
) -> list[Outcome]:
    """One policy's run through ``plan``: the outcomes, by position."""
    with _no_cycle_collection():
        simulated = build(trace, plan, one, replicas, seed, settings)
        if progress is not None:
            _show_progress(simulated, one.name, len(plan), progress)
        simulated.queue.run()
        if progress is not None:
            progress(one.name, simulated.done, len(plan))
        outcomes = [outcome for outcome in simulated.outcomes if outcome is not None]
        assert len(outcomes) == len(plan), "a request was lost in the simulation"
        return outcomes


def build(
    trace: Trace,
    plan: Sequence[Arrival],
    one: Contender,
    replicas: int,
    seed: int,
    settings: SimulationSettings,
    *,
    tap: CacheEventSink | None = None,
) -> SimulatedFleet:
    """A fleet with everything in it, whose clock has not started.

    With KV events, ``tap`` hears of every cache's changes as they happen.
    """
    if one.informed:
        settings = informed(settings)
    size, count = trace.block_tokens, settings.routers
    queue = EventQueue()
    fleets = make_fleets(one, replicas, size, seed, settings)
    lag_s = settings.peer_lag_s
    link = None if count == 1 or lag_s is None else PeerLink(queue, lag_s, fleets)
    events = settings.kv_events
    feed = None if events is None else KvEventFeed(queue, fleets, events, random.Random(f"{seed} kv events"))

    pool = _pool(fleets, settings, settings.all_replicas(replicas), size) if one.pooled else None

    def make_scheduler(replica: ReplicaSettings) -> Scheduler:
        if pool is not None:
            return Scheduler(pool, replica.limits())
        return replica.scheduler(size, record_events=feed is not None)

    def make_row(told: ReplicaEvents) -> ReplicaRow:
        return ReplicaRow(
            queue,
            [settings.replica_settings(index) for index in range(settings.all_replicas(replicas))],
            settings.step_time if settings.kv_moves is None else PulledStepTime(settings.step_time),
            told,
            make_scheduler,
            None if feed is None else _both(feed.publish, tap),
        )

    simulated = SimulatedFleet(
        queue,
        [SimulatedRouter(fleet) for fleet in fleets],
        make_row,
        plan,
        _prompt_maker(size, settings),
        block_tokens=size,
        rng=random.Random(f"{seed} routers"),
        network_delay_s=settings.network_delay_s,
        report_interval_s=settings.report_interval_s,
        report_lag_s=settings.report_lag_s,
        changes=settings.changes,
        restarted=None if feed is None else feed.restarted,
        moves=settings.kv_moves,
    )
    if link is not None:
        link.heard = simulated.send_held
    return simulated


def _both(publish: CacheEventSink, tap: CacheEventSink | None) -> CacheEventSink:
    if tap is None:
        return publish

    def told(replica: int, events: list[CacheEvent]) -> None:
        tap(replica, events)
        publish(replica, events)

    return told


def _pool(fleets: Sequence[Fleet], settings: SimulationSettings, replicas: int, size: int) -> PooledCache:
    """One cache for all, known to every router."""
    tokens = sum(settings.replica_settings(replica).capacity_tokens for replica in range(replicas))
    pool = PooledCache(max(1, tokens // size), size)
    for fleet in fleets:
        assert isinstance(fleet.policy, PooledFinish)
        fleet.policy.cache = pool
    return pool


def make_fleets(
    one: Contender, replicas: int, block_tokens: int, seed: int, settings: SimulationSettings
) -> list[Fleet]:
    """What each router knows and decides with."""
    return [
        _fleet(one, replicas, block_tokens, settings, f"{seed} {one.name}" + f" {k}" * (k > 0))
        for k in range(settings.routers)
    ]


def _fleet(one: Contender, replicas: int, size: int, settings: SimulationSettings, seed: str) -> Fleet:
    exact = settings.kv_events is not None
    blocks = BlockSettings("warmroute", size) if exact else BlockSettings()
    rng = random.Random(seed if settings.ties_seed is None else settings.ties_seed)
    return Fleet(
        [_spec(replica, replicas, blocks, settings) for replica in range(settings.all_replicas(replicas))],
        one.make(rng),
        FleetSettings(
            slo_ttft_s=settings.slo.ttft_ms / 1e3,
            slo_tpot_s=settings.slo.tpot_ms / 1e3,
            hold=settings.hold and one.holds and settings.one_queue_each,
            guard_caches=settings.guard_caches,
            exact=exact,
        ),
        layout=UniformLayout(size) if settings.read_prompt is None else TEXT_LAYOUT,
        tokens_per_unit=1.0 if settings.read_prompt is None else TEXT_TOKENS_PER_BYTE,
    )


def _spec(replica: int, prefilling: int, blocks: BlockSettings, settings: SimulationSettings) -> ReplicaSpec:
    spec = ReplicaSpec(f"replica-{replica}", f"sim://replica-{replica}", blocks=blocks)
    moves = settings.kv_moves
    if moves is not None:
        spec = replace(
            spec,
            role=moves.role(replica, prefilling),
            kv_pull=moves.pull(replica, prefilling),
            kv_source=spec.name,
            transfer_fixed_s=moves.transfer_s,
            transfer_token_s=moves.transfer_token_s,
        )
    if not settings.true_costs:
        return spec
    own = settings.replica_settings(replica)
    prefill, decode = true_costs(SlowedStepTime(settings.step_time, own.slowdown), own.max_batched_tokens)
    return replace(spec, prefill=prefill, decode=decode)


def _prompt_maker(size: int, settings: SimulationSettings) -> Callable[[Arrival], Prompt]:
    if (read := settings.read_prompt) is not None:
        return lambda arrival: read(arrival.request)
    layout = UniformLayout(size)
    naming = BlockNaming("warmroute", size)
    exact = settings.kv_events is not None

    def make(arrival: Arrival) -> Prompt:
        request = arrival.request
        return Prompt(
            keys=request.block_ids,
            units=request.prompt_tokens,
            layout=layout,
            stream=True,
            max_tokens=request.output_tokens if settings.tell_max_tokens else None,
            chains={naming: request.block_ids} if exact else None,
        )

    return make


@contextmanager
def _no_cycle_collection() -> Iterator[None]:
    """Millions of cache blocks live as long as a run: looking at them again and again doubles its time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
            gc.collect()


def _show_progress(simulated: SimulatedFleet, policy: str, total: int, progress: Progress) -> None:
    def tick() -> None:
        progress(policy, simulated.done, total)
        if simulated.done < total:
            simulated.queue.at(simulated.queue.now + PROGRESS_EVERY_S, tick)

    simulated.queue.at(0.0, tick)


def result_of(
    policy: str,
    trace: Trace,
    plan: Sequence[Arrival],
    outcomes: Sequence[Outcome],
    replicas: int,
    settings: SimulationSettings,
) -> Result:
    """The figures of one policy's run."""

    @cache
    def cold_s(prompt_tokens: int) -> float:
        return cold_prefill_s(settings.step_time, prompt_tokens, settings.replica.max_batched_tokens)

    measured_from_s = warmup_end_s(outcomes, settings.warmup_share)
    by_arrival = sorted(range(len(plan)), key=lambda position: outcomes[position].sent_s)
    ideal = ideal_cached_share(
        (
            (request.block_ids, request.prompt_tokens, outcomes[position].sent_s >= measured_from_s)
            for position in by_arrival
            for request in (plan[position].request,)
        ),
        trace.block_tokens,
    )
    return summarize(
        policy,
        outcomes,
        replicas=settings.all_replicas(replicas),
        slo=settings.slo,
        cold_prefill_s=cold_s,
        warmup_share=settings.warmup_share,
        ideal=ideal,
    )
