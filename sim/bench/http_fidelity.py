"""The simulator against the real thing: a trace over HTTP through our router to replicas, and simulated.

The simulated replicas are made from the real ones in two steps. Each is measured alone, through a router of
its own: how a decode step grows with its batch, and about what a prompt takes, from which the load follows.
Then, before each policy's run and after the last, other requests of the same kind go through a router to all
of them: what those took, and how that varies, is the step time. The simulation gets the trace's own tokens,
and nothing of the runs it is compared with. Ties are broken alike; what steps take is drawn anew in each of
several simulations. All of that in rounds, with other requests in each: what a machine does besides changes
from minute to minute, and a run is one draw. A run is simulated at the pace of the two measured ones around
it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean

import aiohttp

from replica.config import ReplicaConfig
from replica.contract.cost_fit import fit_decode, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from sim.bench.as_sent import Body, bodies_of, reader
from sim.bench.exact_trace import exact_trace, tokens_of
from sim.bench.followed import followed
from sim.bench.other_work import cpu_times, others_share
from sim.bench.replica_model import ReplicaModel, replica_model, tuned
from sim.bench.same_decisions import same_decisions
from sim.calibrate.measure import Measurements, MeasureSettings, measure
from sim.contender import contender
from sim.demo.local_fleet import LocalReplica, ReplicaPlan, forget_prefixes, start_replicas, start_router
from sim.demo.processes import ChildProcesses
from sim.first_model import first_model
from sim.outcome import Outcome
from sim.replay import Replay, ReplaySettings, replay
from sim.results import Result
from sim.simulate import run_once, simulate
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from sim.workload.arrivals import plan_arrivals
from sim.workload.hot_prefix import HotPrefix, hot_prefix_trace
from sim.workload.prompt_text import PromptText
from sim.workload.trace import Trace

PROBE_EVERY_S = 1.0
"""Of the router that ``start_router`` starts."""
DECODE_TOKENS = 64
PAUSE_S = 0.1
"""Between two prompts of a measurement."""
MEASURED_THROUGH = "round_robin"
LEAST_MEASURED = 16
"""Requests before each policy's run, and after the last, from which the step time is read."""
SIMULATED_SEEDS = 5
WORDS_TOLD = 64
SALT = "fidelity"


@dataclass(frozen=True, slots=True)
class HttpFidelityPlan:
    """What is sent to what."""

    model: str = "tiny"
    replicas: int = 2
    requests: int = 200
    """Under each policy, in each round."""
    rounds: int = 3
    apps: int = 24
    system_tokens: int = 1_000
    """Of an app, the median."""
    user_tokens: int = 120
    """Of a question, the median."""
    output_tokens: int = 12
    """Of a reply, the median."""
    repeats: int = 3
    """Of each point at which a replica is measured alone."""
    load: float = 0.3
    """Of the replicas' time, were every prompt computed whole."""
    kv_tokens: int = 16_384
    """Each replica's: less than all system prompts take."""
    step_tokens: int = 2_048
    seed: int = 1
    warmup_share: float = 0.25
    """Of each run."""
    policies: tuple[str, ...] = ("round_robin", "least_loaded", "prefix_affinity", "predicted_finish")

    @property
    def measured_requests(self) -> int:
        """In each run that the step time is read from."""
        return max(LEAST_MEASURED, self.requests // 4)

    @property
    def all_requests(self) -> int:
        """That are sent in all runs."""
        runs = self.rounds * len(self.policies)
        return runs * self.requests + (runs + 1) * self.measured_requests

    def trace(self, requests: int, seed: int) -> Trace:
        """Requests to apps with system prompts of their own, unequally popular, one a second."""
        mix = HotPrefix(
            apps=self.apps,
            zipf=0.6,
            system_tokens=self.system_tokens,
            hot_share=0.0,
            user_tokens=self.user_tokens,
            output_tokens=self.output_tokens,
            spread=0.4,
            per_s=1.0,
        )
        return hot_prefix_trace(mix, requests=requests, seed=seed)


def usual_plan(model: str) -> HttpFidelityPlan:
    """The defaults; fewer and shorter prompts for models that need half a second for one on a core.

    Theirs are chosen by simulation alone: half of all requests or more find their system prompt under either
    policy, so that no median lies between hits and misses, and the misses still part the two. Over 24
    simulations each of seeds 1, 11 and 21 chance does 1 to 5% in TTFT p50 and .4 to 1.2 points of the cached
    share; mean TTFT differs by 28 to 35%.
    """
    if model == HttpFidelityPlan().model:
        return HttpFidelityPlan()
    return HttpFidelityPlan(
        model,
        requests=120,
        rounds=2,
        apps=16,
        system_tokens=200,
        user_tokens=20,
        output_tokens=4,
        repeats=1,
        load=0.6,
        kv_tokens=3_072,
        policies=("round_robin", "predicted_finish"),
    )


@dataclass(frozen=True, slots=True)
class HttpFidelity:
    """What came out."""

    model: ReplicaModel
    rate: float
    """Requests a second."""
    live: tuple[tuple[Result, ...], ...]
    """By policy, one of each round."""
    simulated: tuple[tuple[tuple[Result, ...], ...], ...]
    """By policy, of each round several seeds."""
    followed: tuple[tuple[Result | None, ...], ...]
    """By policy, of each round one simulation in which the live router's choices were made."""
    same_decisions: tuple[tuple[float | None, ...], ...]
    """By policy, of each round what share of the live router's decisions the simulated one makes, too."""
    others_share: float | None
    """Of the machine, what other programs took during the live runs; ``None`` where that is not told."""


@dataclass(frozen=True, slots=True)
class Sent:
    """Requests with the words and the tokens that they had."""

    made_up: Trace
    settings: ReplaySettings
    """Of whoever sends them, but where to and how fast."""
    bodies: tuple[Body, ...]
    exact: Trace


async def http_fidelity(
    plan: HttpFidelityPlan, folder: Path, progress: Callable[[str, int, int], None]
) -> HttpFidelity:
    """Measure, replay under each policy, simulate. Configs and logs go to ``folder``. Raises ChildError."""
    with ChildProcesses(folder) as children:
        made = ReplicaPlan(plan.model, plan.kv_tokens, plan.step_tokens, threads=1)
        started = await start_replicas(children, folder, plan.replicas, made, lambda text: None)
        # Named as the simulator names its own: what is hashed to a home has the same home in both.
        replicas = [replace(replica, name=f"replica-{index}") for index, replica in enumerate(started)]
        url = replicas[0].url
        served = (await first_model(url)).name
        longest = max(request.prompt_tokens for request in plan.trace(plan.requests, plan.seed).requests)
        # One tells for all: they are equal, and slow models take minutes.
        alone = replicas if plan.repeats > 1 else replicas[:1]
        routers = [await start_router(children, folder, [replica], MEASURED_THROUGH) for replica in alone]
        points = await _measured([router.url for router in routers], longest, plan, progress)
        children.stop([router.child for router in routers])
        prefill, _ = fit_prefill([point for one in points for point in one.prefill])
        decode, _ = fit_decode([point for one in points for point in one.decode])
        characters = await _characters_per_token(url)

        async def requests(count: int, seed: int, salt: str) -> Sent:
            trace = plan.trace(count, seed)
            settings = ReplaySettings(
                url="",
                model=served,
                salt=salt,
                seed=plan.seed,
                characters_per_token=characters,
                ignore_eos=True,
                warmup_share=plan.warmup_share,
            )
            bodies = bodies_of(trace, settings)
            tokens = await tokens_of(url, [body["messages"] for body in bodies])
            return Sent(trace, settings, bodies, exact_trace(trace, tokens, _block_tokens()))

        compared = [
            await requests(plan.requests, plan.seed + number, f"{SALT} {number}")
            for number in range(plan.rounds)
        ]
        rate = _rate(plan, compared[0].exact, prefill, decode)
        whole = f"all runs, about {max(1.0, plan.all_requests / rate / 60.0):.0f} min"
        sent_before = 0
        progress(whole, 0, plan.all_requests)

        async def through(policy: str, sent: Sent, label: str) -> Replay:
            nonlocal sent_before

            def replayed(job: str, done: int, total: int) -> None:
                progress(job, done, total)
                progress(whole, sent_before + done, plan.all_requests)

            settings = replace(sent.settings, speed=rate, label=label)
            run = await _live(sent.made_up, policy, settings, replicas, children, folder, replayed)
            sent_before += len(run.outcomes)
            return run

        live: list[list[Replay]] = [[] for _ in plan.policies]
        measured: list[tuple[Trace, tuple[Outcome, ...]]] = []

        async def measure_between() -> None:
            number = len(measured) + 1
            others = await requests(
                plan.measured_requests, plan.seed + plan.rounds + number, f"{SALT} measured {number}"
            )
            run = await through(MEASURED_THROUGH, others, f"measured, {number}")
            measured.append((others.exact, run.outcomes))

        before = cpu_times()
        for number, sent in enumerate(compared, 1):
            for runs, policy in zip(live, plan.policies, strict=True):
                await measure_between()
                label = policy if plan.rounds == 1 else f"{policy}, {number} of {plan.rounds}"
                runs.append(await through(policy, sent, label))
        await measure_between()
        others = others_share(before, cpu_times())

    def outcomes_of(model: ReplicaModel, trace: Trace) -> list[Outcome]:
        arrivals = plan_arrivals(trace, rate=rate, seed=plan.seed)
        kind = contender(MEASURED_THROUGH)
        return run_once(trace, arrivals, kind, plan.replicas, plan.seed, _settings(plan, model, plan.seed))

    model = tuned(replica_model([run for _, run in measured], decode), measured, outcomes_of)
    paces = [_paces_of(model, at, len(plan.policies)) for at in range(len(plan.policies))]
    simulated = tuple(
        tuple(
            _simulated(plan, policy, sent, model.at_pace(pace), rate, progress)
            for sent, pace in zip(compared, of_policy, strict=True)
        )
        for policy, of_policy in zip(plan.policies, paces, strict=True)
    )
    same_choices = tuple(
        tuple(
            followed(sent.exact, run.outcomes, plan.replicas, _settings(plan, model, plan.seed), plan.seed)
            for sent, run in zip(compared, runs, strict=True)
        )
        for runs in live
    )
    alike = tuple(
        tuple(
            _same_decisions(plan, policy, sent, run, model, [replica.name for replica in replicas])
            for sent, run in zip(compared, runs, strict=True)
        )
        for policy, runs in zip(plan.policies, live, strict=True)
    )
    results = tuple(
        tuple(replace(run.result, policy=policy) for run in runs)
        for policy, runs in zip(plan.policies, live, strict=True)
    )
    return HttpFidelity(model, rate, results, simulated, same_choices, alike, others)


def _paces_of(model: ReplicaModel, policy: int, policies: int) -> list[float]:
    """Of the policy's runs, round by round: each lies between two measured ones."""
    between = [(before + after) / 2.0 for before, after in pairwise(model.paces)]
    return between[policy::policies]


def _simulated(
    plan: HttpFidelityPlan,
    policy: str,
    sent: Sent,
    model: ReplicaModel,
    rate: float,
    progress: Callable[[str, int, int], None],
) -> tuple[Result, ...]:
    """One round of one policy, with several seeds."""
    made: list[Result] = []
    for seed in range(plan.seed, plan.seed + SIMULATED_SEEDS):
        settings = replace(_settings(plan, model, seed), read_prompt=reader(sent.exact, sent.bodies))
        made += simulate(
            sent.exact, [policy], replicas=plan.replicas, rate=rate, seed=seed, settings=settings
        )
        progress(f"simulated {policy}, {sent.settings.salt}", len(made), SIMULATED_SEEDS)
    return tuple(made)


def _same_decisions(
    plan: HttpFidelityPlan, policy: str, sent: Sent, run: Replay, model: ReplicaModel, names: Sequence[str]
) -> float | None:
    """Of one round; replicas that got nothing come last."""
    places = [names.index(name) for name in run.replicas]
    places += [place for place in range(len(names)) if place not in places]
    settings = replace(_settings(plan, model, plan.seed), read_prompt=reader(sent.exact, sent.bodies))
    return same_decisions(sent.exact, run.outcomes, places, policy, settings, plan.seed)


async def _measured(
    urls: Sequence[str], longest: int, plan: HttpFidelityPlan, progress: Callable[[str, int, int], None]
) -> list[Measurements]:
    """Every replica's times, one replica after the other."""
    made = []
    for url in urls:
        settings = MeasureSettings(
            url=url,
            model=(await first_model(url)).name,
            salt=url,
            longest_tokens=longest,
            repeats=plan.repeats,
            most_sequences=4,
            output_tokens=DECODE_TOKENS,
            prompt_output_tokens=plan.output_tokens,
            pause_s=PAUSE_S,
        )
        made.append(await measure(settings, progress=progress))
    return made


async def _characters_per_token(url: str) -> float:
    words = PromptText(1, salt=SALT)
    text = words.prompt((), WORDS_TOLD * 4, "length")
    short, long = await tokens_of(
        url, [[{"role": "user", "content": part}] for part in (text[:WORDS_TOLD], text)]
    )
    return (len(text) - WORDS_TOLD) / (len(long) - len(short))


def _block_tokens() -> int:
    """Of a replica whose config does not say."""
    return int(ReplicaConfig.model_fields["block_size"].default)


def _rate(plan: HttpFidelityPlan, trace: Trace, prefill: PrefillCost, decode: DecodeCost) -> float:
    """Requests a second at which the replicas are busy for ``plan.load`` of their time, caches left aside."""
    work_s = fmean(
        prefill.seconds(request.prompt_tokens) + request.output_tokens * decode.step_seconds(1)
        for request in trace.requests
    )
    return plan.load * plan.replicas / work_s


def _settings(plan: HttpFidelityPlan, model: ReplicaModel, seed: int) -> SimulationSettings:
    return SimulationSettings(
        replica=ReplicaSettings(
            capacity_tokens=plan.kv_tokens,
            max_batched_tokens=plan.step_tokens,
            max_running=int(ReplicaConfig.model_fields["max_running"].default),
        ),
        step_time=model.step_time(seed),
        ties_seed=plan.seed,
        report_interval_s=PROBE_EVERY_S,
        warmup_share=plan.warmup_share,
    )


async def _live(
    trace: Trace,
    policy: str,
    settings: ReplaySettings,
    replicas: Sequence[LocalReplica],
    children: ChildProcesses,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> Replay:
    """``trace`` through a new router with ``policy`` to replicas with empty caches."""
    async with aiohttp.ClientSession() as session:
        await forget_prefixes(session, replicas)
    router = await start_router(children, folder, replicas, policy, settings.seed)
    made = await replay(trace, replace(settings, url=router.url), progress=progress)
    children.stop([router.child])
    return made
