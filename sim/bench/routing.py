"""Routing quality over HTTP: one trace, through one router after another, before emulated replicas.

Every router gets fresh replicas with empty caches and the same requests at the same times.
"""

import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from sim.bench.emulated_replicas import CHARACTERS_PER_TOKEN, STEP_TIME
from sim.bench.routers import Absent, Router
from sim.bench.server_connection import MOCK_MODEL
from sim.bench.started_router import start_router
from sim.demo.processes import ChildError, ChildProcesses, free_ports
from sim.replay import ReplaySettings, replay
from sim.results import Result, Slo
from sim.workload.trace import Trace

REPLICAS_LIMIT_S = 20.0


@dataclass(frozen=True, slots=True)
class RoutingPlan:
    """What is sent, and to what."""

    replicas: int = 8
    rate: float = 2.5
    """Timed traces: so many times as fast as recorded; sessions: so many start in a second."""
    speed: float = 10.0
    """The replicas' clock goes so many times as fast as the wall's."""
    seed: int = 1
    warmup_share: float = 0.25
    mean_think_s: float = 1.0
    slo: Slo = field(default_factory=Slo)


async def measure_routing(
    routers: Sequence[Router],
    trace: Trace,
    plan: RoutingPlan,
    progress: Callable[[str, int, int], None],
) -> tuple[list[Result], list[Absent]]:
    """``trace`` through each of ``routers``; times are the replicas'. Those that do not start are told.

    Raises ``ChildError`` when the replicas do not start.
    """
    results: list[Result] = []
    absent: list[Absent] = []
    for router in routers:
        with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder:
            try:
                results.append(await through(router, trace, plan, Path(folder), progress))
            except NotStarted as error:
                absent.append(Absent(router.name, f"it did not start: {error}"))
    return results, absent


class NotStarted(ChildError):
    """A router did not start."""


async def through(
    router: Router,
    trace: Trace,
    plan: RoutingPlan,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> Result:
    """``trace`` through one router before fresh replicas. Raises ``ChildError`` or ``NotStarted``."""
    with ChildProcesses(folder) as children:
        urls = await start_emulated(children, plan)
        try:
            started = await start_router(router, urls, children, folder)
        except ChildError as error:
            raise NotStarted(str(error)) from None
        settings = replay_settings(plan, [f"http://127.0.0.1:{started.port}"], router.name)
        return (await replay(trace, settings, progress=progress)).result


async def start_emulated(children: ChildProcesses, plan: RoutingPlan) -> list[str]:
    """Fresh replicas as ``plan`` wants them; their URLs, once they answer. Raises ``ChildError``."""
    ports = free_ports(plan.replicas)
    command = [sys.executable, "-P", "-m", "sim.bench.emulated_replicas", f"{plan.speed:g}", *map(str, ports)]
    replicas = children.start("replicas", command)
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    for url in urls:
        await children.wait_ready(replicas, url + "/health", REPLICAS_LIMIT_S)
    return urls


def replay_settings(plan: RoutingPlan, urls: Sequence[str], label: str) -> ReplaySettings:
    """How a trace is sent to routers at ``urls``, in turn, in front of emulated replicas."""
    return ReplaySettings(
        url=urls[0],
        other_urls=tuple(urls[1:]),
        model=MOCK_MODEL,
        salt="bench",
        speed=plan.rate * plan.speed,
        seed=plan.seed,
        characters_per_token=CHARACTERS_PER_TOKEN,
        mean_think_s=plan.mean_think_s,
        slo=plan.slo,
        warmup_share=plan.warmup_share,
        cold_prefill_us=1e6 * STEP_TIME.prefill_token_s,
        label=label,
        clock_speed=plan.speed,
    )


def scaled(slo: Slo, speed: float) -> Slo:
    """``slo`` on the wall's clock, for the router's config."""
    return replace(slo, ttft_ms=slo.ttft_ms / speed, tpot_ms=slo.tpot_ms / speed)
