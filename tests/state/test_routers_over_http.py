"""Three ``warmroute serve`` processes, one Redis, fake replicas: what a client and an operator see."""

import asyncio
import json
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeReplica,
    Hang,
    Plan,
    SeenRequest,
    Send,
    Wait,
    chunk,
    delta,
    sized,
)
from tests.fakes.proxy_rig import CHAT_STREAM
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import RedisServer, needs_redis
from tests.fakes.router_process import RouterProcess, router_process

pytestmark = needs_redis

LIMIT_S = 20.0
ENDLESS = [Send(STREAM_HEAD + chunk(delta("hel"))), Hang()]


class Prefiller:
    """How a replica with a prefix cache answers: the longer, the more of the chat it has not seen yet.

    It does not tell what was cached: the routers' own beliefs stand.
    """

    def __init__(self) -> None:
        self._seen: dict[str, int] = {}

    def __call__(self, request: SeenRequest) -> Plan:
        text = json.loads(request.body)["messages"][0]["content"]
        chat = text.split(":")[0]
        new = max(0, len(text) - self._seen.get(chat, 0))
        self._seen[chat] = max(len(text), self._seen.get(chat, 0))
        gate = asyncio.Event()
        asyncio.get_running_loop().call_later(0.004 + 15e-6 * new, gate.set)
        return [Wait(gate), Send(sized(b'{"object": "chat.completion", "choices": []}'))]


class Site:
    """Replicas, a store, and as many routers as are started."""

    def __init__(self, folder: Path, replicas: list[FakeReplica], server: RedisServer) -> None:
        self.folder = folder
        self.replicas = replicas
        self.server = server
        self.routers: list[RouterProcess] = []
        self.stack = AsyncExitStack()
        self._started = 0

    async def start_router(self, **keys: Any) -> RouterProcess:
        self._started += 1
        folder = self.folder / str(self._started)
        folder.mkdir()
        state = {"kind": "redis", "url": self.server.url, "lease_s": 1.0, "timeout_ms": 500}
        keys = {"expose_routing": True, "shutdown_timeout_s": 1.0, "state": state} | keys
        router = await self.stack.enter_async_context(router_process(folder, self.replicas, **keys))
        self.routers.append(router)
        return router

    async def metric(self, router: RouterProcess, name: str, **labels: str) -> float:
        for sample in await self._samples(router):
            if sample.name == name and labels.items() <= sample.labels.items():
                return float(sample.value)
        raise AssertionError(f"no {name} {labels}")

    async def metrics(self, router: RouterProcess) -> dict[str, list[float]]:
        """All values of one moment, by name."""
        values: dict[str, list[float]] = {}
        for sample in await self._samples(router):
            values.setdefault(sample.name, []).append(float(sample.value))
        return values

    async def _samples(self, router: RouterProcess) -> list[Sample]:
        client = await RawClient.connect(router.admin)
        await client.post(b"", "/metrics", method="GET")
        page = (await client.answer()).body.decode()
        client.leave()
        return [sample for family in text_string_to_metric_families(page) for sample in family.samples]

    async def until_metric(self, router: RouterProcess, name: str, value: float, **labels: str) -> None:
        await until(lambda: self._is(router, name, value, labels))

    async def _is(self, router: RouterProcess, name: str, value: float, labels: dict[str, str]) -> bool:
        return await self.metric(router, name, **labels) == value

    async def all_sharing(self) -> None:
        for router in self.routers:
            await self.until_metric(router, "warmroute_state", 1.0, state="sharing")
            await self.until_metric(router, "warmroute_state_peers", len(self.routers) - 1)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not await condition():
        assert time.monotonic() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


def with_site(folder: Path, scenario: Callable[[Site], Awaitable[None]], *, replicas: int = 4) -> None:
    async def main() -> None:
        fakes = [FakeReplica() for _ in range(replicas)]
        server = RedisServer()
        await server.start()
        for fake in fakes:
            await fake.start()
        site = Site(folder, fakes, server)
        try:
            async with site.stack:
                await scenario(site)
        finally:
            await server.kill()
            for fake in fakes:
                await fake.stop()

    asyncio.run(main())


async def replica_for(router: RouterProcess, session: int, turns: int) -> str:
    """The replica that a chat of so many turns goes to."""
    text = f"session {session}: " + " ".join(f"turn {turn} " + "word " * 200 for turn in range(turns))
    answer = await router.ask({"model": "m", "messages": [{"role": "user", "content": text}]})
    assert answer.status == 200
    replica = answer.field("x-warmroute-replica")
    assert replica is not None
    return replica


def test_B118_B021_a_session_stays_on_its_replica_whichever_router_it_comes_through(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes of different hash seeds; one is killed midway, and its successor knows what it knew.

    60 chats of 10 turns, 6 at a time, for the case's 200: with all turns at once, leaving a busy replica
    while the chat is short would be right.
    """

    async def scenario(site: Site) -> None:
        for seed in ("1", "2", "3"):
            monkeypatch.setenv("PYTHONHASHSEED", seed)
            await site.start_router()
        await site.all_sharing()
        for fake in site.replicas:
            fake.default = Prefiller()
        same: list[bool] = []
        through_new: list[bool] = []
        for group in range(10):
            chats = range(6 * group, 6 * group + 6)
            homes: list[str] = []
            for turn in range(1, 11):
                if (group, turn) == (4, 6):
                    dead = site.routers.pop(0)
                    dead.process.kill()
                    await dead.exit_code()
                    monkeypatch.setenv("PYTHONHASHSEED", "4")
                    await site.start_router()
                routers = [site.routers[(chat + turn) % 3] for chat in chats]
                replicas = await asyncio.gather(
                    *(replica_for(router, chat, turn) for router, chat in zip(routers, chats, strict=True))
                )
                if turn > 1:
                    stayed = [before == now for before, now in zip(homes, replicas, strict=True)]
                    same += stayed
                    if (group, turn) >= (4, 6):
                        new = site.routers[-1]
                        through_new += [one for one, via in zip(stayed, routers, strict=True) if via is new]
                homes = replicas
                await asyncio.sleep(0.03)  # a client thinks longer than news travels
        assert len(same) == 540 and sum(same) >= 0.95 * 540, sum(same)
        assert len(through_new) > 80 and sum(through_new) >= 0.95 * len(through_new), through_new
        successor = site.routers[-1]
        assert any("knows what router" in line for line in successor.log), successor.log

    with_site(tmp_path, scenario)


def test_B093_a_blocked_router_is_let_go_and_takes_its_place_again(tmp_path: Path) -> None:
    """Its process is stopped for twice its lease: the others forget its work, and hear of it again."""

    async def scenario(site: Site) -> None:
        for fake in site.replicas:
            fake.default = ENDLESS
        state = {"kind": "redis", "url": site.server.url, "lease_s": 0.6, "timeout_ms": 200}
        blocked, other = [await site.start_router(state=state) for _ in range(2)]
        await site.all_sharing()
        clients = [await RawClient.connect(blocked.address) for _ in range(20)]
        for client in clients:
            await client.post(CHAT_STREAM)
            await client.head()
        await site.until_metric(other, "warmroute_state_peers_outstanding", 20.0)
        blocked.process.send_signal(signal.SIGSTOP)
        stopped_at = time.monotonic()
        try:
            await site.until_metric(other, "warmroute_state_peers_outstanding", 0.0)
            assert time.monotonic() - stopped_at < 2 * 0.6 + 0.5
            await site.until_metric(other, "warmroute_state_peers", 0.0)
            while time.monotonic() - stopped_at < 2 * 0.6:  # as long as the case has it
                assert (await other.get("/readiness")).status == 200, "its own table stands"
        finally:
            blocked.process.send_signal(signal.SIGCONT)
        await site.all_sharing()
        await site.until_metric(other, "warmroute_state_peers_outstanding", 20.0)
        for client in clients:
            client.leave()
        await site.until_metric(other, "warmroute_state_peers_outstanding", 0.0)

    with_site(tmp_path, scenario, replicas=2)


def test_a_router_killed_with_200_in_flight_leaves_nothing_and_disturbs_nobody(tmp_path: Path) -> None:
    lease_s = 2.0

    async def scenario(site: Site) -> None:
        gate = asyncio.Event()
        start, end = STREAM_HEAD + chunk(delta("hel")), chunk(delta("lo")) + chunk(DONE_EVENT) + LAST_CHUNK
        for fake in site.replicas:
            fake.default = [Send(start), Wait(gate), Send(end)]
        state = {"kind": "redis", "url": site.server.url, "lease_s": lease_s}
        dying, staying = [await site.start_router(state=state) for _ in range(2)]
        await site.all_sharing()

        async def stream(router: RouterProcess) -> RawClient:
            client = await RawClient.connect(router.address)
            await client.post(CHAT_STREAM)
            assert (await client.head()).status == 200
            return client

        lost = [await stream(dying) for _ in range(200)]
        kept = [await stream(staying) for _ in range(20)]
        await site.until_metric(staying, "warmroute_state_peers_outstanding", 200.0)
        dying.process.kill()
        killed_at = time.monotonic()
        while await site.metric(staying, "warmroute_state_peers_outstanding"):
            assert time.monotonic() - killed_at < 2 * lease_s, "its reservations outlive its lease"
            assert (await staying.get("/readiness")).status == 200
        queued = [
            await site.metric(staying, f"warmroute_replica_{name}", replica=f"r{number}")
            for number in range(4)
            for name in ("queued", "decoding")
        ]
        assert sum(queued) == 20, "only its own are counted"
        gate.set()
        for client in kept:
            body = b""
            while piece := await client.chunk():
                body += piece
            assert body.endswith(DONE_EVENT)
            client.leave()
        assert (await staying.ask(CHAT_STREAM)).whole
        assert await site.metric(staying, "warmroute_broken_streams_total") == 0.0
        for client in lost:
            client.leave()

    with_site(tmp_path, scenario)


def test_K09_requests_go_on_while_redis_is_frozen_and_routers_find_each_other_again(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        one, two = await site.start_router(), await site.start_router()
        await site.all_sharing()
        site.server.freeze()
        for _ in range(30):
            assert (await one.ask()).status == 200
        for router in (one, two):
            await site.until_metric(router, "warmroute_state", 1.0, state="cut_off")
            assert (await router.ask()).status == 200
        site.server.thaw()
        await site.all_sharing()
        for router in (one, two):
            told = [line for line in router.log if "shared state in" in line]
            assert len(told) == 3, told  # shared, cut off, shared again

    with_site(tmp_path, scenario)


def test_an_operator_drains_a_replica_at_one_router_for_all(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        one, two = await site.start_router(), await site.start_router()
        await site.all_sharing()

        async def order(method: str) -> None:
            client = await RawClient.connect(one.admin)
            await client.post(b"", "/drain/r0", method=method)
            assert (await client.answer()).status == 200
            client.leave()

        await order("POST")
        await site.until_metric(two, "warmroute_replica_up", 0.0, replica="r0")
        client = await RawClient.connect(two.admin)
        await client.post(b"", "/fleet", method="GET")
        shown = (await client.answer()).json()["state"]
        client.leave()
        assert shown["state"] == "sharing" and shown["fault"] is None and shown["gaps"] == 0
        assert [peer["outstanding"] for peer in shown["peers"]] == [0] and shown["lag_ms"] > 0.0
        assert {await replica_for(two, session, 1) for session in range(8)} == {"r1"}
        late = await site.start_router()
        await site.until_metric(late, "warmroute_replica_up", 0.0, replica="r0")
        await order("DELETE")
        await site.until_metric(two, "warmroute_replica_up", 1.0, replica="r0")

    with_site(tmp_path, scenario, replicas=2)


def test_a_stopped_router_says_so(tmp_path: Path) -> None:
    """SIGTERM: exit in time, and the others let go of its work at once, not after the lease."""

    async def scenario(site: Site) -> None:
        state = {"kind": "redis", "url": site.server.url, "lease_s": 60.0}
        one, two = await site.start_router(state=state), await site.start_router(state=state)
        await site.all_sharing()
        one.process.terminate()
        assert await one.exit_code() == 0
        await site.until_metric(two, "warmroute_state_peers", 0.0)

    with_site(tmp_path, scenario, replicas=1)
