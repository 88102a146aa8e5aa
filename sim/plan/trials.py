"""The answer tried: the simulator's fleet, with the step time that the arithmetic implies."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import log

from sim.plan.config import NumbersTraffic, SimulatePlan, SloPlan, TraceTraffic
from sim.plan.plan_error import PlanError
from sim.plan.replica_cost import ReplicaCost
from sim.plan.worksheet import Worksheet
from sim.results import Result, Slo
from sim.simulate import Progress, SimulationSettings, simulate
from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 64
PREFIX_IDS = 1 << 32
"""Block ids of shared prefix ``k`` start at ``k * PREFIX_IDS``; those of single requests come after."""


HIT_RATE_TOLERANCE = 0.03
MOST_TRIALS = 6


@dataclass(frozen=True, slots=True)
class Trial:
    """What is simulated, but for the number of replicas."""

    trace: Trace
    rate: float
    policy: str
    seed: int
    settings: SimulationSettings
    progress: Progress | None = None

    @staticmethod
    def of(
        simulate_plan: SimulatePlan,
        traffic: NumbersTraffic | TraceTraffic,
        slo: SloPlan,
        cost: ReplicaCost,
        trace: Trace | None,
        progress: Progress | None = None,
    ) -> "Trial":
        """The trial of a plan: its own trace, or one made from its averages."""
        settings = SimulationSettings(
            replica=cost.settings(), step_time=cost.step_time(), slo=Slo(slo.ttft_ms, slo.tpot_ms)
        )
        if isinstance(traffic, TraceTraffic):
            assert trace is not None
            return Trial(
                trace.head(simulate_plan.requests),
                traffic.rate,
                simulate_plan.policy,
                simulate_plan.seed,
                settings,
                progress,
            )
        made = planned_trace(traffic, simulate_plan)
        return Trial(made, 1.0, simulate_plan.policy, simulate_plan.seed, settings, progress)

    def run(self, replicas: int) -> Result:
        """The fleet of that many replicas; raises ``PlanError``."""
        try:
            results = simulate(
                self.trace,
                [self.policy],
                replicas=replicas,
                rate=self.rate,
                seed=self.seed,
                settings=self.settings,
                progress=None if self.progress is None else self._named(replicas, self.progress),
            )
        except ValueError as error:
            raise PlanError(f"simulate: {error}") from None
        return results[0]

    def _named(self, replicas: int, progress: Progress) -> Progress:
        def shown(policy: str, done: int, total: int) -> None:
            progress(f"{policy}, {replicas} replicas", done, total)

        return shown


def planned_trace(traffic: NumbersTraffic, plan: SimulatePlan) -> Trace:
    """Poisson arrivals with the plan's averages: shared prefixes of unequal popularity, log-normal lengths.

    A cold request (``1 - warm_share`` of them) has a prefix of its own.

    >>> traffic = NumbersTraffic(kind="numbers", requests_per_s=5, prompt_tokens=3300, shared_tokens=2900,
    ...                          output_tokens=250)
    >>> trace = planned_trace(traffic, SimulatePlan(requests=4000))
    >>> span_s = trace.requests[-1].timestamp_ms / 1000
    >>> round(4000 / span_s), round(sum(one.prompt_tokens for one in trace.requests) / 4000, -2)
    (5, 3300.0)
    """
    rng = random.Random(f"{plan.seed} plan")
    popularity = list(accumulate(1.0 / rank**traffic.zipf for rank in range(1, traffic.prefixes + 1)))
    shared_blocks = traffic.shared_tokens // BLOCK_TOKENS
    next_id = (traffic.prefixes + 1) * PREFIX_IDS
    requests: list[TraceRequest] = []
    now_ms = 0.0
    for _ in range(plan.requests):
        now_ms += rng.expovariate(traffic.requests_per_s) * 1e3
        prefix = rng.choices(range(traffic.prefixes), cum_weights=popularity)[0]
        new_tokens = _length(rng, traffic.prompt_tokens - traffic.shared_tokens, traffic.spread)
        output_tokens = _length(rng, traffic.output_tokens, traffic.spread)
        prompt_tokens = traffic.shared_tokens + new_tokens
        ids = list(range(prefix * PREFIX_IDS, prefix * PREFIX_IDS + shared_blocks))
        if rng.random() >= traffic.warm_share:
            ids = []
        fresh = prompt_tokens // BLOCK_TOKENS - len(ids)
        ids.extend(range(next_id, next_id + fresh))
        next_id += fresh
        requests.append(TraceRequest(prompt_tokens, output_tokens, tuple(ids), timestamp_ms=now_ms))
    return Trace("the plan's averages", BLOCK_TOKENS, tuple(requests))


def write_trial(
    sheet: Worksheet, trial: Trial, replicas: int, title: str, scope: str, keys: Sequence[str]
) -> None:
    """One simulation; of its quantities those in ``keys``, called ``<scope>_simulated_...``."""
    sheet.section(title)
    _write(sheet, trial, replicas, trial.run(replicas), f"{scope}_simulated", keys)


def search_trials(sheet: Worksheet, trial: Trial, replicas: int, share: float) -> None:
    """The answer simulated, and its neighbours until the fewest replicas that keep the promise are found.

    Quantities are called ``simulated_...`` for the answer, ``simulated_N_...`` for N other replicas.
    """
    sheet.section("Tried under the virtual clock")
    results = {replicas: trial.run(replicas)}

    def kept(size: int) -> bool:
        return (results[size].in_slo_share or 0.0) >= share

    step = -1 if kept(replicas) else 1
    size = replicas
    while size + step >= 1 and len(results) < MOST_TRIALS:
        size += step
        results[size] = trial.run(size)
        if kept(size) == (step > 0):
            break
    rows = []
    for size in sorted(results):
        name = "simulated" if size == replicas else f"simulated_{size}"
        keys = _write(sheet, trial, size, results[size], name)
        rows.append([f"{size}", *(f"{name}_{key}" for key in keys)])
    columns = [("replicas", ""), *((title, unit) for _, _, unit, title in _found(results[replicas]))]
    sheet.grid("", columns, rows)
    enough = [size for size in sorted(results) if kept(size)]
    says = f"of those tried, the fewest of which {share:.0%} of requests kept their promise"
    if not enough:
        sheet.conclude(
            f"Simulated, not even {max(results)} replicas keep the promise to {share:.0%} of requests."
        )
        return
    sheet.found("simulated_replicas", enough[0], "replicas", says, "simulated: the table above")
    if enough[0] > replicas:
        sheet.conclude(f"Simulated, {enough[0]} replicas are needed: plan with that.")
    elif enough[0] < replicas:
        sheet.conclude(
            f"Simulated, {enough[0]} would keep the promise; {replicas} leave the room that max_utilization "
            "asks for."
        )
    else:
        sheet.conclude(f"Simulated, {replicas} keep the promise to {share:.0%} of requests and fewer do not.")


def _write(
    sheet: Worksheet,
    trial: Trial,
    replicas: int,
    result: Result,
    name: str,
    keys: Sequence[str] | None = None,
) -> list[str]:
    found = [one for one in _found(result) if keys is None or one[0] in keys]
    count = len(trial.trace.requests)
    how = f"simulated: {count} requests of {trial.trace.name} on {replicas} replicas, {trial.policy}"
    with sheet.scope(name):
        for key, value, unit, says in found:
            sheet.found(key, value, unit, says, f"{how}, seed {trial.seed}")
    if result.errors:
        kinds = ", ".join(f"{kind} ({count})" for kind, count in result.error_kinds)
        sheet.conclude(f"Of {result.requests} simulated requests {result.errors} failed: {kinds}.")
    return [key for key, *_ in found]


def _found(result: Result) -> tuple[tuple[str, float, str, str], ...]:
    return (
        ("ttft_mean_ms", _ms(result.ttft_s.mean), "ms", "first token, mean"),
        ("ttft_p50_ms", _ms(result.ttft_s.p50), "ms", "first token, median"),
        ("ttft_p99_ms", _ms(result.ttft_s.p99), "ms", "first token, p99"),
        ("tpot_mean_ms", result.tpot_ms.mean or 0.0, "ms", "per token, mean"),
        ("hit_rate", result.cached_share or 0.0, "", "cached share"),
        ("in_slo", result.in_slo_share or 0.0, "", "in time"),
    )


def conclude_hit_rate(sheet: Worksheet, planned: str, simulated: str) -> None:
    """Says so when the simulated fleet kept less in its caches than the plan counted on."""
    gap = sheet.line("hit_rate_gap", f"{planned} - {simulated}", "", "planned less simulated cached share")
    if gap > HIT_RATE_TOLERANCE:
        sheet.conclude(
            f"The simulated fleet had {sheet[simulated]:.1%} of prompt tokens cached, {gap * 100:.0f} points "
            "fewer than planned: its caches also hold what is never asked for again. Plan with that, or "
            "with more room."
        )


def _ms(seconds: float | None) -> float:
    return 1e3 * (seconds or 0.0)


def _length(rng: random.Random, mean: int, spread: float) -> int:
    return max(1, round(rng.lognormvariate(log(mean) - spread**2 / 2.0, spread)))
