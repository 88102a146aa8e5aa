"""B117 over HTTP: routers that share place requests by the load of all, not by what each of them sent."""

import asyncio
from pathlib import Path

from tests.fakes.proxy_rig import CHAT_STREAM
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import needs_redis
from tests.fakes.router_process import RouterProcess
from tests.state.members import until
from tests.state.test_routers_over_http import ENDLESS, Site, with_site

pytestmark = needs_redis


def test_B117_load_is_even_and_a_killed_router_leaves_nothing(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        for fake in site.replicas:
            fake.default = ENDLESS
        policy = {"kind": "least_loaded", "measure": "in_flight"}
        routers = [await site.start_router(policy=policy) for _ in range(3)]
        await site.all_sharing()
        clients: list[RawClient] = []

        async def open_stream(router: RouterProcess) -> None:
            client = await RawClient.connect(router.address)
            await client.post(CHAT_STREAM)
            await client.head()
            clients.append(client)

        for number in range(240):  # most come to one router
            await open_stream(routers[(0, 0, 0, 0, 1, 2)[number % 6]])
        answering = [fake.answering for fake in site.replicas]
        assert sum(answering) == 240 and max(answering) <= 1.1 * 60, answering

        await site.until_metric(routers[1], "warmroute_state_peers_outstanding", 200.0)
        routers[0].process.kill()
        await site.until_metric(routers[1], "warmroute_state_peers_outstanding", 40.0)
        for client in clients:
            client.leave()
        await site.until_metric(routers[1], "warmroute_state_peers_outstanding", 0.0)

    with_site(tmp_path, scenario)


def test_B117_a_router_fills_what_another_leaves_empty(tmp_path: Path) -> None:
    """Two replicas have ten streams each of one router's, two have none: the next 20 go there.

    A router that saw its own alone would spread them: two replicas had three times the others' load.
    """

    async def scenario(site: Site) -> None:
        for fake in site.replicas:
            fake.default = ENDLESS
        policy = {"kind": "least_loaded", "measure": "in_flight"}
        one, two = [await site.start_router(policy=policy) for _ in range(2)]
        await site.all_sharing()
        clients: dict[str, list[RawClient]] = {f"r{number}": [] for number in range(4)}

        async def opened(router: RouterProcess, streams: int) -> None:
            for _ in range(streams):
                client = await RawClient.connect(router.address)
                await client.post(CHAT_STREAM)
                clients[str((await client.head()).field("x-warmroute-replica"))].append(client)

        await opened(one, 40)
        assert [len(there) for there in clients.values()] == [10] * 4
        for name in ("r0", "r1"):
            for client in clients[name]:
                client.leave()
            clients[name].clear()
        await site.until_metric(two, "warmroute_state_peers_outstanding", 20.0)
        await opened(two, 20)
        assert [len(there) for there in clients.values()] == [10] * 4
        for there in clients.values():
            for client in there:
                client.leave()

    with_site(tmp_path, scenario)


async def skewed(
    site: Site, routers: list[RouterProcess], at_once: int = 24, *, sharing: bool = False
) -> float:
    """Max over mean of 120 streams, as the replicas count them, opened ``at_once`` at a time.

    Routers that are ``sharing`` have heard of all before when the next come, however busy the machine is.
    Of six clients four come to the first router; with one router all come there. Leaves nothing open.
    """

    async def opened(number: int) -> RawClient:
        router = routers[(0, 0, 0, 0, 1, 2)[number % 6] % len(routers)]
        client = await RawClient.connect(router.address)
        messages = [{"role": "user", "content": f"{number} " + "word " * 100}]
        await client.post({**CHAT_STREAM, "messages": messages})
        await client.head()
        return client

    clients: list[RawClient] = []
    for first in range(0, 120, at_once):
        clients += await asyncio.gather(*(opened(number) for number in range(first, first + at_once)))
        if sharing:  # of six clients four, one and one are a router's own
            for router, own in zip(routers, (4, 1, 1), strict=True):
                others = len(clients) * (6 - own) / 6
                await site.until_metric(router, "warmroute_state_peers_outstanding", others)
    answering = [fake.answering for fake in site.replicas]
    assert sum(answering) == 120
    for client in clients:
        client.leave()

    await until(lambda: not sum(fake.answering for fake in site.replicas))
    return max(answering) * len(answering) / 120


def test_B117_three_routers_spread_skewed_clients_as_one_does(tmp_path: Path) -> None:
    """The default policy, clients by 24 at once, with Redis and when it is gone."""

    async def scenario(site: Site) -> None:
        for fake in site.replicas:
            fake.default = ENDLESS
        alone = await site.start_router(state={"kind": "memory"})
        site.routers.clear()
        routers = await asyncio.gather(*(site.start_router() for _ in range(3)))
        await site.all_sharing()
        one = await skewed(site, [alone])
        three = await skewed(site, routers, sharing=True)
        assert one <= 1.3 and three <= 1.3 and three <= 1.3 * one, (one, three)
        for router in routers:
            await site.until_metric(router, "warmroute_state_peers_outstanding", 0.0)
        await site.server.kill()
        for router in routers:
            await site.until_metric(router, "warmroute_state", 1.0, state="cut_off")
        cut_off = await skewed(site, routers)
        assert cut_off <= 1.6, cut_off

    with_site(tmp_path, scenario)
