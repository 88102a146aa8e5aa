"""Two routers, one Redis: a tenant's limit is one for both, and without Redis each has its part of it."""

from pathlib import Path
from typing import Any

from tests.fakes.proxy_rig import CHAT_STREAM
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import needs_redis
from tests.fakes.router_process import RouterProcess
from tests.state.test_routers_over_http import ENDLESS, Site, until, with_site

pytestmark = needs_redis

KEY = {"Authorization": "Bearer sk-a"}
TENANTS = {
    "salt_secret": "0123456789abcdef",
    "routers": 1,  # both are heard of
    "members": [{"name": "acme", "keys": ["sk-a"], "limits": {"concurrent": 4}}],
}


async def acme(router: RouterProcess) -> dict[str, Any]:
    client = await RawClient.connect(router.admin)
    await client.post(b"", "/fleet", method="GET")
    told = (await client.answer()).json()["tenants"]
    client.leave()
    return next(one for one in told if one["name"] == "acme")


async def until_seen(router: RouterProcess, in_flight: int) -> None:
    async def seen() -> bool:
        return bool((await acme(router))["fleet"]["in_flight"] == in_flight)

    await until(seen)


async def until_share(router: RouterProcess, share: float) -> None:
    async def is_so() -> bool:
        return bool((await acme(router))["limits"]["share"] == share)

    await until(is_so)


async def begin(router: RouterProcess) -> RawClient:
    """A stream that goes on until its client leaves."""
    client = await RawClient.connect(router.address)
    await client.post(CHAT_STREAM, **KEY)
    assert (await client.head()).status == 200
    return client


async def refused(router: RouterProcess) -> None:
    client = await RawClient.connect(router.address)
    await client.post(CHAT_STREAM, **KEY)
    answer = await client.answer()
    assert (answer.status, answer.error["code"]) == (429, "tenant_concurrent")
    client.leave()


def test_a_limit_is_one_for_all_routers_and_each_keeps_to_its_part_without_redis(tmp_path: Path) -> None:
    async def scenario(site: Site) -> None:
        for fake in site.replicas:
            fake.default = ENDLESS
        one = await site.start_router(tenants=TENANTS, hold={"enabled": False})
        two = await site.start_router(tenants=TENANTS, hold={"enabled": False})
        await site.all_sharing()
        clients = [await begin(router) for router in (one, one, one, two)]
        for router in (one, two):
            await until_seen(router, 4)
            await refused(router)
        clients.pop(0).leave()
        await until_seen(two, 3)
        clients.append(await begin(two))
        await until_seen(one, 4)
        assert (await acme(one))["fleet"]["requests"] == 5

        site.server.freeze()
        for router in (one, two):  # two of four each; the others' are forgotten with their lease
            await until_share(router, 0.5)
            await until_seen(router, 2)
            await refused(router)
        clients.pop(0).leave()
        await until_seen(one, 1)
        clients.append(await begin(one))
        await refused(one)

        site.server.thaw()
        for router in (one, two):
            await until_share(router, 1.0)
            await until_seen(router, 4)
            await refused(router)
        for client in clients:
            client.leave()
        for router in (one, two):
            await until_seen(router, 0)

    with_site(tmp_path, scenario, replicas=1)
