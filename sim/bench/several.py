"""Several routers over HTTP: one trace through 1, 2, 4, … of them that share their state, at the same load.

Every count gets fresh replicas and fresh router processes on one Redis; requests go to the routers in turn.
"""

import asyncio
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import aiohttp

from sim.bench.routers import ours
from sim.bench.routing import RoutingPlan, replay_settings, scaled, start_emulated
from sim.bench.started_router import start_router
from sim.demo.processes import ChildError, ChildProcesses, free_ports
from sim.replay import replay
from sim.results import Result
from sim.workload.trace import Trace

FLUSH_MS = 5.0
"""The router's default, in the replicas' time."""
SHARING_LIMIT_S = 30.0
POLL_EVERY_S = 0.05


@dataclass(frozen=True, slots=True)
class Run:
    """So many routers, and what came of it."""

    routers: int
    result: Result


async def measure_several(
    counts: Sequence[int], trace: Trace, plan: RoutingPlan, progress: Callable[[str, int, int], None]
) -> list[Run]:
    """``trace`` through each of ``counts`` routers. Raises ``ChildError`` when something does not start."""
    runs: list[Run] = []
    for count in counts:
        with tempfile.TemporaryDirectory(prefix="warmroute-bench-") as folder:
            runs.append(Run(count, await _through(count, trace, plan, Path(folder), progress)))
    return runs


async def _through(
    count: int, trace: Trace, plan: RoutingPlan, folder: Path, progress: Callable[[str, int, int], None]
) -> Result:
    with ChildProcesses(folder) as children:
        replicas = await start_emulated(children, plan)
        state = {
            "kind": "redis",
            "url": await _start_redis(children, folder),
            "flush_ms": max(1.0, FLUSH_MS / plan.speed),
        }
        admins = free_ports(count)
        urls = []
        for number, admin in enumerate(admins):
            router = replace(
                ours(scaled(plan.slo, plan.speed), admin=admin, state=state), name=f"router-{number}"
            )
            started = await start_router(router, replicas, children, folder)
            urls.append(f"http://127.0.0.1:{started.port}")
        await _all_share(admins)
        label = "1 router" if count == 1 else f"{count} routers"
        return (await replay(trace, replay_settings(plan, urls, label), progress=progress)).result


async def _start_redis(children: ChildProcesses, folder: Path) -> str:
    program = shutil.which("redis-server")
    if program is None:
        raise ChildError("no redis-server on PATH; on Debian: apt-get install redis-server")
    (port,) = free_ports(1)
    keep = ("--save", "", "--appendonly", "no", "--dir", str(folder))
    child = children.start("redis", [program, "--port", str(port), "--bind", "127.0.0.1", *keep])
    deadline = time.monotonic() + SHARING_LIMIT_S
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            if child.exit_code is not None or time.monotonic() > deadline:
                raise child.died() from None
            await asyncio.sleep(POLL_EVERY_S)
        else:
            writer.close()
            return f"redis://127.0.0.1:{port}"


async def _all_share(admins: Sequence[int]) -> None:
    """Wait until every router hears all others."""
    deadline = time.monotonic() + SHARING_LIMIT_S
    async with aiohttp.ClientSession() as session:
        for admin in admins:
            while True:
                async with session.get(f"http://127.0.0.1:{admin}/fleet") as answer:
                    state = (await answer.json())["state"]
                if state["state"] == "sharing" and len(state["peers"]) == len(admins) - 1:
                    break
                if time.monotonic() > deadline:
                    raise ChildError(
                        f"the routers do not hear each other: {state['state']}, {len(state['peers'])} of "
                        f"{len(admins) - 1} others, {state['fault'] or 'no fault told'}"
                    )
                await asyncio.sleep(POLL_EVERY_S)
