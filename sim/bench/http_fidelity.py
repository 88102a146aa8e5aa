"""The simulator against the real thing: a trace over HTTP through our router to replicas, and simulated.

The replicas are measured first: one after the other, for at loads worth a comparison they seldom compute at
once; through a router of ours each, for that is the way; with pauses and replies of some tokens, for that is
how they are asked. The simulation gets the fitted step time and the trace's own tokens, and nothing of the
runs it is compared with.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import aiohttp

from replica.config import ReplicaConfig
from replica.contract.cost_fit import FitError, fit_decode, fit_prefill
from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.prompt_blocks import text_prompt
from sim.bench.exact_trace import exact_trace, tokens_of
from sim.calibrate.measure import Measurements, MeasureSettings, measure
from sim.demo.local_fleet import LocalReplica, ReplicaPlan, forget_prefixes, start_replicas, start_router
from sim.demo.processes import ChildProcesses
from sim.first_model import first_model
from sim.replay import ReplaySettings, made_up_messages, replay
from sim.results import Result
from sim.simulate import simulate
from sim.simulated_replica import ReplicaSettings
from sim.simulation_settings import SimulationSettings
from sim.step_time.linear import LinearStepTime
from sim.workload.arrivals import plan_arrivals
from sim.workload.hot_prefix import HotPrefix, hot_prefix_trace
from sim.workload.prompt_text import PromptText
from sim.workload.trace import Trace

PROBE_EVERY_S = 1.0
"""Of the router that ``start_router`` starts."""
DECODE_TOKENS = 64
PAUSE_S = 0.1
"""Between two prompts of a measurement."""
REPEATS = 5
MEASURED_THROUGH = "round_robin"
WORDS_TOLD = 64
SALT = "fidelity"
APPS = HotPrefix(
    apps=12,
    zipf=0.6,
    system_tokens=500,
    hot_share=0.0,
    user_tokens=120,
    output_tokens=12,
    spread=0.4,
    per_s=1.0,
)
"""What is sent: apps with system prompts of their own, unequally popular, one request a second."""


@dataclass(frozen=True, slots=True)
class HttpFidelityPlan:
    """What is sent to what."""

    model: str = "tiny"
    replicas: int = 2
    requests: int = 60
    load: float = 0.2
    """Of the replicas' time, were every prompt computed whole."""
    kv_tokens: int = 6_144
    """Each replica's: less than all system prompts take."""
    step_tokens: int = 2_048
    seed: int = 1
    warmup_share: float = 0.25
    policies: tuple[str, ...] = ("round_robin", "least_loaded", "prefix_affinity", "predicted_finish")


@dataclass(frozen=True, slots=True)
class HttpFidelity:
    """What came out."""

    prefill: PrefillCost
    decode: DecodeCost
    errors: tuple[FitError, FitError]
    """Of the fits to prefill and decode."""
    rate: float
    """Requests a second."""
    live: tuple[Result, ...]
    simulated: tuple[Result, ...]


async def http_fidelity(
    plan: HttpFidelityPlan, folder: Path, progress: Callable[[str, int, int], None]
) -> HttpFidelity:
    """Measure, replay under each policy, simulate. Configs and logs go to ``folder``. Raises ChildError."""
    trace = hot_prefix_trace(APPS, requests=plan.requests, seed=plan.seed)
    with ChildProcesses(folder) as children:
        made = ReplicaPlan(plan.model, plan.kv_tokens, plan.step_tokens, threads=1)
        started = await start_replicas(children, folder, plan.replicas, made, lambda text: None)
        # Named as the simulator names its own: what is hashed to a home has the same home in both.
        replicas = [replace(replica, name=f"replica-{index}") for index, replica in enumerate(started)]
        model = (await first_model(replicas[0].url)).name
        longest = max(request.prompt_tokens for request in trace.requests)
        routers = [await start_router(children, folder, [replica], MEASURED_THROUGH) for replica in replicas]
        points = await _measured([router.url for router in routers], longest, progress)
        children.stop([router.child for router in routers])
        prefill, prefill_error = fit_prefill([point for one in points for point in one.prefill])
        decode, decode_error = fit_decode([point for one in points for point in one.decode])
        words = PromptText(
            trace.block_tokens, salt=SALT, characters_per_token=await _characters_per_token(replicas[0].url)
        )
        prompts = [
            made_up_messages(words, arrival.request, position)
            for position, arrival in enumerate(plan_arrivals(trace, seed=plan.seed))
        ]
        exact = exact_trace(trace, await tokens_of(replicas[0].url, prompts), _block_tokens())
        rate = _rate(plan, exact, prefill, decode)
        live = []
        for policy in plan.policies:
            live.append(await _live(policy, plan, trace, words, rate, replicas, children, folder, progress))
    bodies = {
        id(request): {"model": model, "messages": list(said)}
        for request, said in zip(exact.requests, prompts, strict=True)
    }
    settings = replace(
        _settings(plan, prefill, decode), read_prompt=lambda request: text_prompt(bodies[id(request)])
    )
    simulated = simulate(
        exact,
        plan.policies,
        replicas=plan.replicas,
        rate=rate,
        seed=plan.seed,
        settings=settings,
        progress=lambda policy, done, total: progress(f"simulated {policy}", done, total),
    )
    return HttpFidelity(prefill, decode, (prefill_error, decode_error), rate, tuple(live), tuple(simulated))


async def _measured(
    urls: Sequence[str], longest: int, progress: Callable[[str, int, int], None]
) -> list[Measurements]:
    """Every replica's times, one replica after the other."""
    made = []
    for url in urls:
        settings = MeasureSettings(
            url=url,
            model=(await first_model(url)).name,
            salt=url,
            longest_tokens=longest,
            repeats=REPEATS,
            most_sequences=4,
            output_tokens=DECODE_TOKENS,
            prompt_output_tokens=APPS.output_tokens,
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
    return plan.load * plan.replicas / work_s / APPS.per_s


def _settings(plan: HttpFidelityPlan, prefill: PrefillCost, decode: DecodeCost) -> SimulationSettings:
    return SimulationSettings(
        replica=ReplicaSettings(
            capacity_tokens=plan.kv_tokens,
            max_batched_tokens=plan.step_tokens,
            max_running=int(ReplicaConfig.model_fields["max_running"].default),
        ),
        step_time=LinearStepTime(
            step_s=decode.fixed_s,
            decode_sequence_s=decode.per_sequence_s,
            prefill_token_s=prefill.per_token_s,
            attention_tokens=prefill.attention_tokens,
            prefill_step_s=max(0.0, prefill.fixed_s - decode.fixed_s),
        ),
        report_interval_s=PROBE_EVERY_S,
        warmup_share=plan.warmup_share,
    )


async def _live(
    policy: str,
    plan: HttpFidelityPlan,
    trace: Trace,
    words: PromptText,
    rate: float,
    replicas: Sequence[LocalReplica],
    children: ChildProcesses,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> Result:
    async with aiohttp.ClientSession() as session:
        await forget_prefixes(session, replicas)
    router = await start_router(children, folder, replicas, policy)
    settings = ReplaySettings(
        url=router.url,
        model=(await first_model(router.url)).name,
        salt=SALT,
        speed=rate,
        seed=plan.seed,
        characters_per_token=words.characters_per_token,
        ignore_eos=True,
        warmup_share=plan.warmup_share,
        label=policy,
    )
    made = await replay(trace, settings, progress=progress)
    children.stop([router.child])
    return made.result
