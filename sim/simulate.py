"""Runs a trace through the router's and the replica's own code under a virtual clock, policy by policy.

Every policy gets the same arrivals, the same replicas and a random generator of its own, all from one seed:
the same seed gives the same result, to the byte.
"""

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache

from router.routing.fleet import Fleet, FleetSettings
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from sim.bounds import ideal_cached_share
from sim.outcome import Outcome
from sim.results import Result, Slo, summarize, warmup_end_s
from sim.simulated_fleet import SimulatedFleet
from sim.simulated_replica import ReplicaSettings
from sim.step_time.presets import PRESETS
from sim.step_time.step_time import StepTime, cold_prefill_s
from sim.workload.arrivals import Arrival, plan_arrivals
from sim.workload.trace import Trace

Progress = Callable[[str, int, int], None]
"""Called now and then with (policy, requests over, requests in all)."""

HOLDING_POLICY = "predicted_finish"
"""The only policy under which the router holds requests (``router.proxy.assembly``)."""
PROGRESS_EVERY_S = 10.0
"""Virtual seconds between two calls."""


@dataclass(frozen=True, slots=True)
class SimulationSettings:
    """Everything about a run but the trace, the policies, the number of replicas, the rate and the seed."""

    replica: ReplicaSettings = field(default_factory=ReplicaSettings)
    step_time: StepTime = PRESETS["emufleet"]
    slo: Slo = field(default_factory=Slo)
    hold: bool = True
    """As the router does by default: under the policy ``predicted_finish`` requests wait in the router while
    their replica has one without a first token."""
    network_delay_s: float = 0.0
    """One way, between router and replica."""
    report_interval_s: float = 2.0
    """How often replicas report their load; the router's probe interval."""
    warmup_share: float = 0.25
    """Of the time in which requests are sent; those sent in it are not measured."""
    mean_think_s: float = 1.0
    """Pause before a turn of a session whose trace tells none; exponential."""


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
    _check(trace, policies, replicas, rate)
    plan = plan_arrivals(trace, rate=rate, seed=seed, mean_think_s=settings.mean_think_s)
    layout = UniformLayout(trace.block_tokens)
    prompts = [
        Prompt(
            keys=arrival.request.block_ids, units=arrival.request.prompt_tokens, layout=layout, stream=True
        )
        for arrival in plan
    ]
    results = []
    for policy in policies:
        with _no_cycle_collection():
            outcomes = _run(trace, plan, prompts, policy, replicas, seed, settings, progress)
        results.append(_result(policy, trace, plan, outcomes, replicas, settings))
    return results


def _check(trace: Trace, policies: Sequence[str], replicas: int, rate: float) -> None:
    for policy in policies:
        if policy not in POLICIES:
            raise ValueError(f"policy {policy!r} is unknown; expected one of {', '.join(sorted(POLICIES))}")
    if not policies:
        raise ValueError(f"no policy given; expected one of {', '.join(sorted(POLICIES))}")
    if replicas < 1:
        raise ValueError(f"replicas is {replicas}; expected 1 or more")
    if not 0 < rate < float("inf"):
        raise ValueError(f"rate is {rate}; expected a number above 0")
    if not trace.requests:
        raise ValueError(f"trace {trace.name} has no requests")


def _run(
    trace: Trace,
    plan: Sequence[Arrival],
    prompts: Sequence[Prompt],
    policy: str,
    replicas: int,
    seed: int,
    settings: SimulationSettings,
    progress: Progress | None,
) -> list[Outcome]:
    fleet = Fleet(
        [ReplicaSpec(f"replica-{index}", f"sim://replica-{index}") for index in range(replicas)],
        POLICIES[policy](random.Random(f"{seed} {policy}")),
        FleetSettings(
            slo_ttft_s=settings.slo.ttft_ms / 1e3,
            slo_tpot_s=settings.slo.tpot_ms / 1e3,
            hold=settings.hold and policy == HOLDING_POLICY,
        ),
        layout=UniformLayout(trace.block_tokens),
        tokens_per_unit=1.0,
    )
    simulated = SimulatedFleet(
        fleet,
        plan,
        prompts,
        settings=settings.replica,
        step_time=settings.step_time,
        block_tokens=trace.block_tokens,
        network_delay_s=settings.network_delay_s,
        report_interval_s=settings.report_interval_s,
    )
    if progress is not None:
        _show_progress(simulated, policy, len(plan), progress)
    simulated.queue.run()
    if progress is not None:
        progress(policy, simulated.done, len(plan))
    outcomes = [outcome for outcome in simulated.outcomes if outcome is not None]
    assert len(outcomes) == len(plan), "a request was lost in the simulation"
    return outcomes


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


def _result(
    policy: str,
    trace: Trace,
    plan: Sequence[Arrival],
    outcomes: Sequence[Outcome],
    replicas: int,
    settings: SimulationSettings,
) -> Result:
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
        replicas=replicas,
        slo=settings.slo,
        cold_prefill_s=cold_s,
        warmup_share=settings.warmup_share,
        ideal=ideal,
    )
