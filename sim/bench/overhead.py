"""What a router costs: its CPU per request and per streamed event, this router's beside the rivals'.

All routers stand in front of the same mock replicas. Each round measures one after the other, so that what
else the machine does meanwhile falls on all; what is reported is the median over the rounds.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from sim.bench.load import LoadError, closed_loop, streams
from sim.bench.process_cpu import cpu_s, process_tree
from sim.bench.prompts import PROMPTS, chat_body
from sim.bench.routers import Absent, Router
from sim.bench.started_router import StartedRouter, start_router
from sim.demo.memory import memory_mib
from sim.demo.processes import ChildError, ChildProcesses

ANSWER_TOKENS = 16
STREAM_PROMPT_KIB = 2
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
    delay_p99_ms: float = 0.0
    """From the replica's sending an event to its arrival at the client."""
    clumped_share: float = 0.0
    """Of events: came in one piece with a later one."""


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
    started: StartedRouter
    requests: dict[int, list[tuple[float, float, int]]] = field(default_factory=dict)
    events: list[EventCost] = field(default_factory=list)
    """By round."""

    def cost(self) -> RouterCost:
        requests = {
            size: RequestCost(
                median(cpu for cpu, _, _ in rows),
                median(rate for _, rate, _ in rows),
                sum(failed for _, _, failed in rows),
            )
            for size, rows in self.requests.items()
        }
        event = EventCost(
            median(one.cpu_us for one in self.events),
            sum(one.lost for one in self.events),
            median(one.delay_p99_ms for one in self.events),
            median(one.clumped_share for one in self.events),
        )
        memory = memory_mib(process_tree(self.started.child.pid)) or 0.0
        return RouterCost(self.started.router.name, requests, event, memory)


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
    started = contender.started
    port, pid = started.port, started.child.pid
    await closed_loop(port, bodies, plan.connections, plan.seconds * WARM_UP_SHARE, folder)
    before = cpu_s(pid)
    answered = await closed_loop(port, bodies, plan.connections, plan.seconds, folder)
    used_s = cpu_s(pid) - before
    if not answered.answers:
        raise LoadError(f"{started.router.name} answered no request of {size} KiB\n{started.child.tail()}")
    cpu_us = used_s / answered.answers * 1e6
    rows = contender.requests.setdefault(size, [])
    rows.append((cpu_us, answered.answers / answered.wall_s, answered.failed))


async def _measure_events(contender: _Contender, bodies: Sequence[bytes], plan: OverheadPlan) -> None:
    started = contender.started
    pid = started.child.pid
    before = cpu_s(pid)
    streamed = await streams(started.port, bodies, plan.streams, plan.events)
    used_s = cpu_s(pid) - before
    if not streamed.events:
        raise LoadError(f"{started.router.name} passed no event on\n{started.child.tail()}")
    clumped_share = streamed.clumped / streamed.events
    contender.events.append(
        EventCost(used_s / streamed.events * 1e6, streamed.lost, streamed.delay_p99_ms, clumped_share)
    )


async def _start_all(
    routers: Sequence[Router], replicas: Sequence[str], children: ChildProcesses, folder: Path
) -> tuple[list[_Contender], list[Absent]]:
    contenders: list[_Contender] = []
    absent: list[Absent] = []
    for router in routers:
        try:
            contenders.append(_Contender(await start_router(router, replicas, children, folder)))
        except ChildError as error:
            absent.append(Absent(router.name, f"it did not start: {error}"))
    return contenders, absent
