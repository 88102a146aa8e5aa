"""Public bug reports about shared state, as a client, an operator and Redis see them: processes under load.

Outages and leases are shorter than in the reports. What matters is scaled with them: a command's limit is
0.5 s, attempts to reach Redis are at most a second apart, a lease is 1 s.
"""

import asyncio
import time
from pathlib import Path

from sim.bench.process_cpu import cpu_s
from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    Plan,
    SeenRequest,
    Send,
    Wait,
    chunk,
    delta,
    openai_plan,
)
from tests.fakes.proxy_rig import CHAT, CHAT_STREAM
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import needs_redis
from tests.fakes.router_process import RouterProcess
from tests.fakes.slow_link import slow_link
from tests.state.members import MOST_CONNECTIONS, connections
from tests.state.test_routers_over_http import Site, with_site

pytestmark = needs_redis

STREAM_START = STREAM_HEAD + chunk(delta("hel"))
STREAM_END = chunk(delta("lo")) + chunk(DONE_EVENT) + LAST_CHUNK
LEASE_S = 1.0
"""As ``Site.start_router`` has it."""


async def clients_of(router: RouterProcess, number: int) -> list[RawClient]:
    return [await RawClient.connect(router.address) for _ in range(number)]


async def finish(client: RawClient) -> None:
    """The rest of a stream; fails unless it is whole."""
    body = b""
    while piece := await client.chunk():
        body += piece
    assert body.endswith(DONE_EVENT)
    client.leave()


async def steadily(router: RouterProcess, per_s: float, seconds: float, connections: int = 10) -> int:
    """Short requests at a steady rate, each answered 200: how many."""
    began, done = time.monotonic(), 0

    async def one_after_another(client: RawClient, first: int) -> None:
        nonlocal done
        for number in range(first, int(per_s * seconds), connections):
            await asyncio.sleep(began + number / per_s - time.monotonic())
            await client.post(CHAT)
            assert (await client.answer()).status == 200
            done += 1
        client.leave()

    clients = await clients_of(router, connections)
    await asyncio.gather(*(one_after_another(client, first) for first, client in enumerate(clients)))
    return done


def test_B022_a_burst_of_400_fails_none_and_needs_no_more_connections(tmp_path: Path) -> None:
    """In one tick; first with a healthy Redis, then with 100 ms of latency each way."""

    async def scenario(site: Site) -> None:
        gate = asyncio.Event()
        for fake in site.replicas:
            fake.default = lambda request: [Send(STREAM_START), Wait(gate), Send(STREAM_END)]
        async with slow_link(site.server.port) as link:
            url = f"redis://127.0.0.1:{link.port}"
            state = {"kind": "redis", "url": url, "lease_s": 5.0, "timeout_ms": 1_000}
            one, two = [await site.start_router(state=state, hold={"enabled": False}) for _ in range(2)]
            await site.all_sharing()
            for delay_s in (0.0, 0.1):
                link.delay_s = delay_s
                clients = await clients_of(one, 400)
                await asyncio.gather(*(client.post(CHAT_STREAM) for client in clients))
                heads = await asyncio.gather(*(client.head() for client in clients))
                assert [head.status for head in heads] == [200] * 400
                await site.until_metric(two, "warmroute_state_peers_outstanding", 400.0)
                assert await connections(site.server) <= 2 * MOST_CONNECTIONS
                gate.set()
                await asyncio.gather(*(finish(client) for client in clients))
                gate.clear()
                await site.until_metric(two, "warmroute_state_peers_outstanding", 0.0)
            assert await site.metric(one, "warmroute_state", state="sharing") == 1.0
            assert await site.metric(one, "warmroute_state_dropped_events_total") == 0.0
            await site.stack.aclose()

    with_site(tmp_path, scenario)


def test_B057_live_streams_stay_counted_and_a_dead_routers_go_while_traffic_continues(tmp_path: Path) -> None:
    """Streams of five leases, 20 of a router that is killed, and steady short requests through the other."""

    async def scenario(site: Site) -> None:
        policy = {"kind": "least_loaded", "measure": "in_flight"}
        dying, staying = [await site.start_router(policy=policy) for _ in range(2)]
        await site.all_sharing()
        gate = asyncio.Event()

        def short_or_long(request: SeenRequest) -> Plan:
            if b'"stream"' in request.body:
                return [Send(STREAM_START), Wait(gate), Send(STREAM_END)]
            return openai_plan(request)

        for fake in site.replicas:
            fake.default = short_or_long

        async def stream(router: RouterProcess) -> RawClient:
            client = await RawClient.connect(router.address)
            await client.post(CHAT_STREAM)
            assert (await client.head()).status == 200
            return client

        lost = [await stream(dying) for _ in range(20)]
        live = [await stream(staying) for _ in range(10)]
        await site.until_metric(staying, "warmroute_state_peers_outstanding", 20.0)
        lives_until = time.monotonic() + 5 * LEASE_S
        traffic = asyncio.create_task(steadily(staying, 100.0, 5 * LEASE_S))

        async def counted() -> tuple[float, float]:
            """By the router that stays: decoding on all replicas, and of that the other router's."""
            page = await site.metrics(staying)
            queued, decoding, tokens = (
                page[f"warmroute_replica_{name}"] for name in ("queued", "decoding", "outstanding_tokens")
            )
            assert min(queued + decoding + tokens) >= 0.0, "a count is negative"
            return sum(decoding), page["warmroute_state_peers_outstanding"][0]

        while time.monotonic() < lives_until - 2 * LEASE_S:
            decoding, others = await counted()
            assert decoding >= 30 and others >= 20, "a live stream is not counted"
            await asyncio.sleep(0.02)
        dying.process.kill()
        killed_at = time.monotonic()
        while (await counted())[1]:
            assert time.monotonic() - killed_at < 2 * LEASE_S, "its leases outlive it"
            await asyncio.sleep(0.02)
        while not traffic.done():
            assert (await counted())[0] >= 10, "a live stream is not counted"
            await asyncio.sleep(0.02)
        assert await traffic == 100 * 5 * LEASE_S
        assert await counted() == (10.0, 0.0)
        gate.set()
        for client in live:
            await finish(client)
        for client in lost:
            client.leave()

    with_site(tmp_path, scenario)


def test_B109_a_dead_store_costs_no_log_storm_and_no_cpu(tmp_path: Path) -> None:
    """500 requests/s throughout. The first seconds are the dear ones: attempts are closest then."""

    async def scenario(site: Site) -> None:
        one = await site.start_router()
        await site.all_sharing()

        async def used_s(seconds: float) -> float:
            """CPU for each request."""
            before = cpu_s(one.process.pid)
            requests = await steadily(one, 500.0, seconds)
            return (cpu_s(one.process.pid) - before) / requests

        await used_s(0.3)
        normal = await used_s(1.0)
        logged = len(one.log)
        await site.server.kill()
        dead = await used_s(2.0)
        (line,) = one.log[logged:]
        assert "it cannot be reached" in line
        await site.server.start()
        await site.all_sharing()
        assert len(one.log) == logged + 2, one.log[logged:]
        normal = min(normal, await used_s(1.0))
        assert dead <= 1.2 * normal, (dead, normal)

    with_site(tmp_path, scenario)
