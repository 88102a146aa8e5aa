"""Routers without sockets: a fleet and its shared state each, against one Redis, in one loop."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

from router.config import RouterConfig, parse_config
from router.ended_tasks import end_tasks
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.state.redis_state import RedisState
from router.state.shared_state import Callbacks, SharedState, StateReport, make_state
from tests.fakes.redis_server import RedisServer

BLOCK = 16
LIMIT_S = 15.0
QUICK = {"lease_s": 1.0, "flush_ms": 2.0, "timeout_ms": 500.0}


def prompt(name: int, blocks: int = 20) -> Prompt:
    keys = [name * 1_000_000 + block for block in range(blocks)]
    return Prompt(keys=keys, units=blocks * BLOCK + 3, layout=UniformLayout(BLOCK), stream=True)


class Member:
    """One router of a fleet of two replicas."""

    def __init__(self, state: dict[str, Any], *, hold: bool = False) -> None:
        self.config: RouterConfig = parse_config(
            {"replicas": [{"url": "http://10.0.0.1"}, {"url": "http://10.0.0.2"}], "state": state}, "test"
        )
        self.fleet = Fleet(
            [ReplicaSpec(replica.effective_name, replica.url) for replica in self.config.replicas],
            POLICIES["predicted_finish"](random.Random(1)),
            FleetSettings(hold=hold),
            layout=UniformLayout(BLOCK),
            tokens_per_unit=1.0,
        )
        for replica in self.fleet.replicas:
            self.fleet.probe_succeeded(replica.index, 0.0)
        self.doubted: list[str] = []
        self.released: list[Held] = []
        self.state: SharedState = make_state(
            self.config, self.fleet, Callbacks(self._released, self.doubted.append)
        )

    def _released(self, now: float) -> None:
        self.released += self.fleet.outbox
        self.fleet.outbox.clear()

    @property
    def report(self) -> StateReport:
        """How its shared state stands."""
        return self.state.report()

    def send(self, name: int, blocks: int = 20) -> InFlight:
        """A request goes out."""
        made = self.fleet.submit(prompt(name, blocks), time.monotonic())
        assert isinstance(made, InFlight)
        return made

    def end(self, flight: InFlight) -> None:
        """It is over."""
        self.fleet.finished(flight, time.monotonic())

    def in_flight(self) -> list[int]:
        """By replica, of all routers as far as this one knows."""
        return [replica.in_flight for replica in self.fleet.replicas]

    def knows(self, name: int, blocks: int = 20) -> bool:
        """Some replica is believed to hold the prompt."""
        return blocks in self.fleet.index.match(prompt(name, blocks).keys)

    async def warmed_from(self) -> str:
        """Who told it what it knew, once somebody has."""
        await until(lambda: self.report.warmed_from is not None)
        return self.report.warmed_from or ""

    async def has_told(self) -> None:
        """Until Redis has all that this router had to tell; at once if it tells nobody."""
        journal, state = self.fleet.journal, self.state
        if journal is None:
            return
        assert isinstance(state, RedisState)
        await until(lambda: not len(journal) and not state._writer._backlog)
        batches = self.report.batches_sent
        await until(lambda: self.report.batches_sent > batches)

    def vanish(self) -> None:
        """The process dies: nobody is told."""
        assert isinstance(self.state, RedisState)
        # once is not enough: redis-py may take it for its own time-out
        self._dying = asyncio.ensure_future(end_tasks(self.state._tasks))


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Poll ``condition`` until it holds; fails after ``limit_s``."""
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.005)


class Members:
    """The routers of one test."""

    def __init__(self, server: RedisServer | None = None, **state: Any) -> None:
        self._keys = QUICK | state
        self._server = server
        self._all: list[Member] = []

    async def start(self, *, url: str | None = None, hold: bool = False, **state: Any) -> Member:
        """One more router."""
        if url is None:
            assert self._server is not None
            url = self._server.url
        member = Member({"kind": "redis", "url": url} | self._keys | state, hold=hold)
        await member.state.start()
        self._all.append(member)
        return member

    async def pair(self) -> tuple[Member, Member]:
        """Two routers that share."""
        one, two = await self.start(), await self.start()
        await until(lambda: all(m.report.state == "sharing" and m.report.peers for m in (one, two)))
        return one, two

    async def stop(self) -> None:
        """All of them."""
        for member in self._all:
            await member.state.stop()


MOST_CONNECTIONS = 3
"""Of a router to Redis: one to read, one to write, one while it is warmed or warms another."""


async def connections(server: RedisServer) -> int:
    """To the server, this one not counted."""
    listed = await server.ask("CLIENT", "LIST")
    assert isinstance(listed, list | bytes)
    return len(listed if isinstance(listed, list) else listed.splitlines()) - 1


def with_redis(
    scenario: Callable[[RedisServer, Members], Awaitable[None]], *options: str, **state: Any
) -> None:
    """Run ``scenario`` against a fresh server; whatever is left of it is stopped."""

    async def main() -> None:
        server = RedisServer(*options)
        await server.start()
        members = Members(server, **state)
        try:
            await scenario(server, members)
        finally:
            await members.stop()
            await server.kill()

    asyncio.run(main())
