"""The demo's course: replicas up, prefill measured, then the same script under one policy after another."""

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from sim.demo.conversation_script import START_EVERY, Conversation, system_prompts_used
from sim.demo.figures import DemoFigures, demo_figures
from sim.demo.local_fleet import (
    LocalReplica,
    LocalRouter,
    ReplicaPlan,
    ask,
    cores,
    forget_prefixes,
    measure_prefill,
    start_replicas,
    start_router,
)
from sim.demo.memory import memory_mib
from sim.demo.play_script import Message, RequestRecord, play
from sim.demo.processes import ChildProcesses
from sim.demo.run_board import ReplicaBoard, RunBoard
from sim.demo.views import View
from sim.replay_client import Answer

REQUEST_LIMIT_S = 300.0
POLL_EVERY_S = 0.5
WATCH_EVERY_S = 1.0
SYSTEM_PROMPT_TOKENS = 750


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What to do, all checked."""

    policies: tuple[str, ...]
    replicas: int
    replica: ReplicaPlan
    script: tuple[Conversation, ...]
    reply_tokens: int

    def unit_s(self, prefill_s_per_token: float) -> float:
        """One unit of the script's time: a cold prefill of a system prompt at the pace of the whole machine.

        Replicas that have to share cores are slower together than one of them is alone.
        """
        return SYSTEM_PROMPT_TOKENS * prefill_s_per_token * self.replicas / min(self.replicas, cores())


@dataclass(slots=True)
class DemoOutcome:
    """What was measured; filled in as the demo goes."""

    prefill_s_per_token: float = 0.0
    peak_memory_mib: float | None = None
    """Of all processes together, this one included."""
    first_error: str | None = None
    runs: list[DemoFigures] = field(default_factory=list)


async def run_demo(plan: DemoPlan, folder: Path, view: View) -> DemoOutcome:
    """Play the demo; configs and logs go to ``folder``. Raises ``ChildError``.

    Whatever was started is stopped when this returns or raises.
    """
    outcome = DemoOutcome()
    with view, ChildProcesses(folder) as children:
        course = asyncio.create_task(_Course(plan, folder, view, children, outcome).go(), name="demo")
        watch = asyncio.create_task(_watch(children, outcome), name="watch children")
        try:
            await asyncio.wait({course, watch}, return_when=asyncio.FIRST_COMPLETED)
            if watch.done():
                watch.result()  # it only ends by raising
            course.result()
        finally:
            await _cancelled(course, watch)
    return outcome


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}" if number == 1 else f"{number} {thing}s"


async def _cancelled(*tasks: "asyncio.Task[None]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def _watch(children: ChildProcesses, outcome: DemoOutcome) -> None:
    """Raise when a child dies; note how much memory all of them take."""
    while True:
        children.check()
        memory = memory_mib([os.getpid(), *(child.pid for child in children.running)])
        if memory is not None:
            outcome.peak_memory_mib = max(memory, outcome.peak_memory_mib or 0.0)
        await asyncio.sleep(WATCH_EVERY_S)


class _Course:
    """One demo on its way."""

    def __init__(
        self, plan: DemoPlan, folder: Path, view: View, children: ChildProcesses, outcome: DemoOutcome
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._view = view
        self._children = children
        self._outcome = outcome

    async def go(self) -> None:
        """All of it."""
        plan, say = self._plan, self._view.say
        say(
            f"starting {plan.replicas} replicas of {plan.replica.model}: "
            f"{_count(plan.replica.threads, 'thread')} and "
            f"room for {plan.replica.kv_tokens:,} tokens of KV each"
        )
        replicas = await start_replicas(self._children, self._folder, plan.replicas, plan.replica, say)
        connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=REQUEST_LIMIT_S)
        async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
            system = plan.script[0].system
            cost_s = await measure_prefill(session, replicas, plan.replica.model, system)
            self._outcome.prefill_s_per_token = cost_s
            say(f"an idle replica prefills {1.0 / cost_s:,.0f} tokens/s")
            requests = sum(len(conversation.turns) for conversation in plan.script)
            popular = sum(conversation.in_burst for conversation in plan.script)
            unit_s = plan.unit_s(cost_s)
            say(
                f"the script: {len(plan.script)} conversations, {requests} requests, "
                f"{system_prompts_used(plan.script)} system prompts; {popular} conversations with one of "
                f"them come almost at once; a new one every {START_EVERY * unit_s:.1f} s otherwise"
            )
            for policy in plan.policies:
                self._outcome.runs.append(await self._under(policy, session, replicas, requests))

    async def _under(
        self, policy: str, session: aiohttp.ClientSession, replicas: Sequence[LocalReplica], requests: int
    ) -> DemoFigures:
        await forget_prefixes(session, replicas)
        router = await start_router(self._children, self._folder, replicas, policy)
        self._view.say(f"{policy}: caches emptied, a new router at {router.url} (admin {router.admin_url})")
        names = [replica.name for replica in replicas]
        cost_s = self._outcome.prefill_s_per_token
        board = RunBoard(policy, requests, cost_s, {name: ReplicaBoard() for name in names})

        async def ask_router(messages: Sequence[Message]) -> Answer:
            model = self._plan.replica.model
            return await ask(session, router.url, model, messages, self._plan.reply_tokens)

        def done(record: RequestRecord) -> None:
            board.request_done(record)
            self._view.changed(board, record)
            if record.answer.error is not None and self._outcome.first_error is None:
                self._outcome.first_error = f"{record.answer.error} {record.answer.error_detail}"

        poll = asyncio.create_task(self._poll(session, router, board), name="poll fleet")
        try:
            records = await play(self._plan.script, self._plan.unit_s(cost_s), ask_router, done)
        finally:
            await _cancelled(poll)
        self._children.stop([router.child])
        return demo_figures(policy, records, names, cost_s)

    async def _poll(self, session: aiohttp.ClientSession, router: LocalRouter, board: RunBoard) -> None:
        began_at = time.monotonic()
        while True:
            with suppress(aiohttp.ClientError, TimeoutError):  # the picture misses one beat
                async with session.get(
                    router.admin_url + "/fleet", timeout=aiohttp.ClientTimeout(total=2.0)
                ) as answer:
                    board.fleet_seen(await answer.json(), time.monotonic() - began_at)
                    self._view.changed(board)
            await asyncio.sleep(POLL_EVERY_S)
