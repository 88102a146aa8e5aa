"""What a router costs: its CPU per request and per streamed event, this router's beside the rivals'.

All routers stand in front of the same mock replicas. Each round measures one after the other, so that what
else the machine does meanwhile falls on all; what is reported is the median over the rounds.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import aiohttp

from sim.bench.load import LoadError, closed_loop, streams
from sim.bench.process_cpu import cpu_s, process_tree
from sim.bench.prompts import PROMPTS, chat_body
from sim.bench.routers import Absent, Router
from sim.demo.memory import memory_mib
from sim.demo.processes import Child, ChildError, ChildProcesses, free_ports

ANSWER_TOKENS = 16
STREAM_PROMPT_KIB = 2
START_LIMIT_S = 60.0
POLL_EVERY_S = 0.1
WARM_UP_SHARE = 0.25
"""So long, of the seconds measured, the same load runs before."""


@dataclass(frozen=True, slots=True)
class OverheadPlan:
    """How much is measured."""

    sizes_kib: tuple[int, ...] = (2, 32, 256)
    seconds: float = 3.0
    """Per prompt size, router and round."""
    rounds: int = 3
    connections: int = 32
    streams: int = 200
    events: int = 100
    """Per stream."""
    replicas: int = 4


@dataclass(frozen=True, slots=True)
class RequestCost:
    """Medians over the rounds, for prompts of one size."""

    cpu_us: float
    """The router's CPU per answer."""
    answers_per_s: float
    failed: int
    """Answers other than 200, of all rounds."""


@dataclass(frozen=True, slots=True)
class EventCost:
    """Medians over the rounds."""

    cpu_us: float
    """The router's CPU per event, requests and heads of the streams included."""
    lost: int
    """Events that never came, of all rounds."""


@dataclass(frozen=True, slots=True)
class RouterCost:
    """One router's figures."""

    name: str
    requests: Mapping[int, RequestCost]
    """By size of the prompt in KiB."""
    event: EventCost
    memory_mib: float


@dataclass(slots=True)
class _Contender:
    router: Router
    child: Child
    port: int
    requests: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict)
    events: list[tuple[float, int]] = field(default_factory=list)

    def cost(self) -> RouterCost:
        requests = {
            size: RequestCost(
                median(cpu for cpu, _, _ in rows),
                median(rate for _, rate, _ in rows),
                sum(failed for _, _, failed in rows),
            )
            for size, rows in self.requests.items()
        }
        event = EventCost(median(cpu for cpu, _ in self.events), sum(lost for _, lost in self.events))
        memory = memory_mib(process_tree(self.child.pid)) or 0.0
        return RouterCost(self.router.name, requests, event, memory)


async def measure_overhead(
    routers: Sequence[Router],
    plan: OverheadPlan,
    replicas: Sequence[str],
    children: ChildProcesses,
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> tuple[list[RouterCost], list[Absent]]:
    """Start ``routers`` before ``replicas`` (URLs) and measure each; those that do not start are told.

    ``progress``: (job, steps done, of so many). Raises ``LoadError`` when one fails later.
    """
    bodies = {
        size: [chat_body(number, size, ANSWER_TOKENS, stream=False) for number in range(PROMPTS)]
        for size in plan.sizes_kib
    }
    streamed = [chat_body(number, STREAM_PROMPT_KIB, plan.events, stream=True) for number in range(PROMPTS)]
    contenders, absent = await _start_all(routers, replicas, children, folder)
    steps = plan.rounds * len(contenders) * (len(bodies) + 1)
    done = 0
    for _ in range(plan.rounds):
        for contender in contenders:
            for size, asked in bodies.items():
                await _measure_requests(contender, size, asked, plan, folder)
                progress("measuring", done := done + 1, steps)
            await _measure_events(contender, streamed, plan)
            progress("measuring", done := done + 1, steps)
    return [contender.cost() for contender in contenders], absent


async def _measure_requests(
    contender: _Contender, size: int, bodies: Sequence[bytes], plan: OverheadPlan, folder: Path
) -> None:
    port, pid = contender.port, contender.child.pid
    await closed_loop(port, bodies, plan.connections, plan.seconds * WARM_UP_SHARE, folder)
    before = cpu_s(pid)
    answered = await closed_loop(port, bodies, plan.connections, plan.seconds, folder)
    used_s = cpu_s(pid) - before
    if not answered.answers:
        raise LoadError(
            f"{contender.router.name} answered no request of {size} KiB\n{contender.child.tail()}"
        )
    cpu_us = used_s / answered.answers * 1e6
    rows = contender.requests.setdefault(size, [])
    rows.append((cpu_us, answered.answers / answered.wall_s, answered.failed))


async def _measure_events(contender: _Contender, bodies: Sequence[bytes], plan: OverheadPlan) -> None:
    pid = contender.child.pid
    before = cpu_s(pid)
    streamed = await streams(contender.port, bodies, plan.streams, plan.events)
    used_s = cpu_s(pid) - before
    if not streamed.events:
        raise LoadError(f"{contender.router.name} passed no event on\n{contender.child.tail()}")
    contender.events.append((used_s / streamed.events * 1e6, streamed.lost))


async def _start_all(
    routers: Sequence[Router], replicas: Sequence[str], children: ChildProcesses, folder: Path
) -> tuple[list[_Contender], list[Absent]]:
    contenders: list[_Contender] = []
    absent: list[Absent] = []
    for router, port in zip(routers, free_ports(len(routers)), strict=True):
        name = router.name.replace(" ", "-")
        own = folder / name
        own.mkdir()
        child = children.start(name, router.command_line(port, replicas, own))
        try:
            await _until_routed(child, port)
        except ChildError as error:
            children.stop([child])
            absent.append(Absent(router.name, f"it did not start: {error}"))
        else:
            contenders.append(_Contender(router, child, port))
    return contenders, absent


async def _until_routed(child: Child, port: int) -> None:
    """Wait until a chat request comes back from a replica. Raises ``ChildError``."""
    body = chat_body(0, 1, 1, stream=False)
    deadline = time.monotonic() + START_LIMIT_S
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3.0), headers=headers) as session:
        while time.monotonic() < deadline:
            if child.exit_code is not None:
                raise child.died()
            try:
                async with session.post(url, data=body) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(POLL_EVERY_S)
    raise ChildError(
        f"no answer within {START_LIMIT_S:.0f} s; the end of its log:\n{child.tail() or '(empty)'}"
    )
