"""The simulator against our router over HTTP, before emulated replicas: what is real is all but the model.

The replicas compute nothing, so a busy machine disturbs little, and their step time is known. What is
compared is the router's process, the proxy, the network and the clock against the simulated ones.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from sim.bench.as_sent import bodies_of, reader
from sim.bench.routers import ours
from sim.bench.routing import RoutingPlan, replay_settings, scaled, through
from sim.results import Result
from sim.simulate import simulate
from sim.simulation_settings import SimulationSettings
from sim.workload.trace import Trace

SIMULATED_SEEDS = 3
"""What they differ in is how ties are broken."""


async def emulated_fidelity(
    policies: Sequence[str], trace: Trace, plan: RoutingPlan, progress: Callable[[str, int, int], None]
) -> tuple[list[list[Result]], list[list[list[Result]]]]:
    """Live and simulated, by policy, in one round, in the replicas' time; of the latter several seeds.

    Raises ChildError; ValueError for sessions.
    """
    if trace.in_sessions:
        raise ValueError(f"{trace.name} is made of sessions; expected a trace with times, to send it alike")
    live = []
    for policy in policies:
        with TemporaryDirectory(prefix="warmroute-bench-") as folder:
            router = ours(scaled(plan.slo, plan.speed), policy)
            live.append([await through(router, trace, plan, Path(folder), progress)])
    bodies = bodies_of(trace, replay_settings(plan, [""], "simulated"))
    settings = SimulationSettings(
        slo=plan.slo, warmup_share=plan.warmup_share, read_prompt=reader(trace, bodies)
    )
    seeds = [
        simulate(
            trace,
            policies,
            replicas=plan.replicas,
            rate=plan.rate,
            seed=seed,
            settings=settings,
            progress=lambda policy, done, total: progress(f"simulated {policy}", done, total),
        )
        for seed in range(plan.seed, plan.seed + SIMULATED_SEEDS)
    ]
    return live, [[[results[at] for results in seeds]] for at in range(len(policies))]
