"""Of how many routers one takes itself to be when it cannot hear them: never of fewer than there were."""

from pathlib import Path

from router.routing.quota import TenantLimits
from router.routing.tenant import Tenant
from router.state.knowledge import taken_in, written_down
from router.state.wire import decode_chunk, encode_chunk
from tests.fakes.redis_server import RedisServer, needs_redis
from tests.state.members import Member, Members, until, with_redis

LIMITED = [(Tenant("acme"), TenantLimits(requests_per_s=20.0))]


@needs_redis
def test_a_store_that_comes_and_goes_again_does_not_make_the_others_forgotten() -> None:
    """At its second fault nobody has been heard since the first: still each is one of three."""

    async def scenario(server: RedisServer, members: Members) -> None:
        three = [await members.start() for _ in range(3)]
        await until(lambda: all(len(member.report.peers) == 2 for member in three))
        for member in three:
            member.fleet.tenants.applied(LIMITED)
            assert member.fleet.tenants.share == 1.0
        await server.kill()
        await until(lambda: not any(member.report.peers for member in three))
        assert [round(member.fleet.tenants.share, 3) for member in three] == [0.333] * 3
        for member in three[1:]:
            member.vanish()
        await server.start()
        await until(lambda: three[0].report.state == "sharing")
        assert three[0].fleet.tenants.share == 1.0
        await server.kill()
        await until(lambda: three[0].report.state == "cut_off")
        assert not three[0].report.peers and round(three[0].fleet.tenants.share, 3) == 0.333

    with_redis(scenario)


@needs_redis
def test_a_router_that_starts_without_redis_takes_the_operators_word() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        await server.kill()
        member = Member({"kind": "redis", "url": server.url})
        member.fleet.tenants.applied(LIMITED, routers=4)
        await member.state.start()
        assert member.fleet.tenants.share == 0.25
        await member.state.stop()

    with_redis(scenario)


def test_what_a_router_writes_down_tells_how_many_there_were() -> None:
    old, new = (Member({"kind": "memory"}).fleet for _ in range(2))
    old.tenants.seen(5)
    for chunk in written_down(old):
        taken_in(new, "", decode_chunk(encode_chunk(chunk)), 0.0)
    new.tenants.applied(LIMITED)
    assert new.tenants.share == 0.2


@needs_redis
def test_a_router_that_starts_without_redis_has_it_from_its_file(
    tmp_path: Path,
) -> None:
    """And the prompts; while others are there it has these from them."""
    own, others = str(tmp_path / "one"), str(tmp_path / "two")

    async def scenario(server: RedisServer, members: Members) -> None:
        one = await members.start(snapshot=own)
        two = await members.start(snapshot=others)
        await until(lambda: bool(one.report.peers and two.report.peers))
        one.end(one.send(1))
        await until(lambda: two.knows(1))
        await one.state.stop()
        again = await members.start(snapshot=own)
        await until(lambda: again.report.warmed_from == two.report.router)
        await again.state.stop()
        await server.kill()
        alone = await members.start(snapshot=own)
        assert alone.report.warmed_from == own and alone.knows(1)
        alone.fleet.tenants.applied(LIMITED)
        assert alone.fleet.tenants.share == 0.5

    with_redis(scenario)
