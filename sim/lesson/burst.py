"""The burst lesson's runs: four rules well informed, then without what they were told, over several seeds."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

from router.routing.policies.predicted_finish import PredictedFinish
from router.routing.policies.round_robin import RoundRobin
from router.routing.view import Policy
from sim.contender import Contender
from sim.kv_event_feed import KvEventSettings
from sim.lesson.burst_trace import BLOCK_TOKENS, BURST_FROM_S, REPLICAS, Burst, make_burst
from sim.lesson.onlooker import Moment, Onlooker
from sim.outcome import Outcome
from sim.results import Result, summarize
from sim.rivals.longest_match import LongestMatch
from sim.rivals.min_ttft import MinTtft
from sim.simulate import SimulationSettings, build
from sim.step_time.step_time import cold_prefill_s

LATE_S = 180.0
"""How late an eviction is told when it is told late: after the burst."""
METRICS_EVERY_S = 1.0

RULES: dict[str, Callable[[random.Random], Policy]] = {
    "round_robin": RoundRobin,
    "longest_match": LongestMatch,
    "no prices": MinTtft,
    "predicted_finish": PredictedFinish,
}


@dataclass(frozen=True, slots=True)
class Switches:
    """What the router is not told."""

    late: bool = False
    """Evictions are told minutes late."""
    blind: bool = False
    """No reservations: replicas look as they did when metrics were last read, every second."""

    def __str__(self) -> str:
        names = [
            name for name, on in (("eviction notice late", self.late), ("no reservations", self.blind)) if on
        ]
        return " and ".join(names) or "well informed"


@dataclass(frozen=True, slots=True)
class Variant:
    """One run of the lesson."""

    rule: str
    switches: Switches


WELL, LATE, BLIND, BOTH = Switches(), Switches(late=True), Switches(blind=True), Switches(True, True)
VARIANTS = (
    *(Variant(rule, WELL) for rule in RULES),
    Variant("longest_match", LATE),
    Variant("predicted_finish", LATE),
    Variant("predicted_finish", BLIND),
    Variant("predicted_finish", BOTH),
)


@dataclass(frozen=True, slots=True)
class Run:
    """One variant, one seed."""

    result: Result
    moments: tuple[Moment, ...]
    """Every decision of the burst, in order."""


@dataclass(frozen=True, slots=True)
class Row:
    """One variant over all seeds: means of the seeds' figures."""

    variant: Variant
    ttft_s: float
    ttft_p99_s: float
    in_slo_share: float
    max_over_mean_work: float
    changed_share: float
    """Of decisions, those that the right numbers would have made otherwise."""


def run_burst(variant: Variant, seed: int) -> Run:
    """One burst through one rule."""
    burst = make_burst(seed)
    switches = variant.switches
    settings = SimulationSettings(
        replica=burst.replica,
        changes=burst.changes,
        hold=False,
        warmup_share=0.0,
        kv_events=KvEventSettings(removal_delay_s=LATE_S if switches.late else None),
    )
    made: list[Onlooker] = []

    def make(rng: random.Random) -> Onlooker:
        made.append(
            Onlooker(
                RULES[variant.rule],
                rng,
                from_s=BURST_FROM_S,
                replicas=REPLICAS,
                block_tokens=BLOCK_TOKENS,
                reservations=not switches.blind,
                metrics_every_s=METRICS_EVERY_S,
            )
        )
        return made[-1]

    fleet = build(
        burst.trace,
        burst.plan,
        Contender(variant.rule, make),
        REPLICAS,
        seed,
        settings,
        tap=lambda replica, events: made[0].cache_changed(replica, events),
    )
    fleet.queue.run()
    outcomes = [outcome for outcome in fleet.outcomes if outcome is not None]
    return Run(_result(variant, burst, outcomes, settings), tuple(made[0].moments))


def _result(
    variant: Variant, burst: Burst, outcomes: Sequence[Outcome], settings: SimulationSettings
) -> Result:
    @cache
    def cold_s(tokens: int) -> float:
        return cold_prefill_s(settings.step_time, tokens, settings.replica.max_batched_tokens)

    return summarize(
        variant.rule,
        outcomes[-burst.burst :],
        replicas=REPLICAS,
        slo=settings.slo,
        cold_prefill_s=cold_s,
        warmup_share=0.0,
        ideal=None,
    )


def row_of(variant: Variant, runs: Sequence[Run]) -> Row:
    """The means of several seeds."""

    def mean(value: Callable[[Run], float | None]) -> float:
        return sum(value(run) or 0.0 for run in runs) / len(runs)

    def changed(run: Run) -> float:
        return sum(moment.decided != moment.rightly for moment in run.moments) / len(run.moments)

    return Row(
        variant,
        mean(lambda run: run.result.ttft_s.mean),
        mean(lambda run: run.result.ttft_s.p99),
        mean(lambda run: run.result.in_slo_share),
        mean(lambda run: run.result.max_over_mean_work),
        mean(changed),
    )
