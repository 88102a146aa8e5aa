"""TLS, Sentinel with a failover, Cluster: the same sharing, through what redis-py offers."""

import asyncio
import logging
from pathlib import Path

import pytest

from router.config_errors import ConfigError
from tests.fakes.redis_server import FREE_PORT, RedisServer, free_port, has_tls, needs_redis
from tests.state.members import Member, Members, until, with_redis

pytestmark = needs_redis

TLS = Path(__file__).parents[1] / "fakes" / "tls"
PATIENT = {"lease_s": 30.0, "timeout_ms": 5_000.0}
"""Nothing that a slow machine does is taken for a fault."""
SOON = ("--repl-diskless-sync-delay", "0")
CERT, KEY = str(TLS / "cert.pem"), str(TLS / "key.pem")


async def shares(members: Members, url: str, **state: object) -> tuple[Member, Member]:
    """Two routers that hear of each other's requests."""
    one, two = await members.start(url=url, **state), await members.start(url=url, **state)
    await until(lambda: all(m.report.state == "sharing" and m.report.peers for m in (one, two)))
    flight = one.send(1)
    await until(lambda: sum(two.in_flight()) == 1)
    one.end(flight)
    await until(lambda: sum(two.in_flight()) == 0)
    return one, two


@pytest.mark.skipif(not has_tls(CERT, KEY), reason="REDIS_SERVER was built without TLS")
def test_tls_with_a_client_certificate() -> None:
    async def main() -> None:
        server = RedisServer(
            "--tls-cert-file", CERT, "--tls-key-file", KEY, "--tls-ca-cert-file", CERT, tls=True
        )  # fmt: skip
        await server.start()
        members = Members(server)
        try:
            await shares(members, server.url, tls={"ca": CERT, "cert": CERT, "key": KEY})
            stranger = await members.start(url=server.url, tls={"ca": CERT})
            await until(lambda: stranger.report.state == "cut_off")
        finally:
            await members.stop()
            await server.kill()

    asyncio.run(main())


def test_unix_socket(tmp_path: Path) -> None:
    path = tmp_path / "redis.sock"

    async def scenario(server: RedisServer, members: Members) -> None:
        await shares(members, f"unix://{path}")

    with_redis(scenario, "--unixsocket", str(path))


@pytest.mark.parametrize("tls", [{"ca": "/nowhere/ca.pem"}, {"cert": CERT, "key": "/nowhere/key.pem"}])
def test_tls_files_that_cannot_be_used_are_named_at_the_start(tls: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=r"state\.tls.*nowhere"):
        Member({"kind": "redis", "url": "rediss://127.0.0.1:1", "tls": tls})


def test_sentinel_leads_to_the_new_master(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "warmroute.state")

    async def scenario(master: RedisServer, members: Members) -> None:
        replica = RedisServer("--replicaof", "127.0.0.1", str(master.port), *SOON)
        await replica.start()
        await replica.until_role("slave")
        config = tmp_path / "sentinel.conf"
        config.write_text(
            f"sentinel monitor fleet 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds fleet 300\n"
            "sentinel failover-timeout fleet 3000\n"
        )
        sentinel = RedisServer(config=config)
        await sentinel.start("--sentinel")
        try:
            hosts = [f"127.0.0.1:{free_port()}", f"127.0.0.1:{sentinel.port}"]  # one of them is down
            state = {"sentinel": {"service": "fleet", "hosts": hosts}}
            one, two = await shares(members, "redis://fleet", **state)
            caplog.clear()
            before = one.report.changes + two.report.changes
            kept = one.send(7)
            await until(lambda: sum(two.in_flight()) == 1)
            await master.kill()
            await until(lambda: one.report.state != "sharing")
            await replica.until_role("master")
            await until(lambda: one.report.state == two.report.state == "sharing")
            await until(lambda: sum(two.in_flight()) == 1)
            told = [line for line in caplog.messages if line.startswith("shared state in")]
            assert len(told) == one.report.changes + two.report.changes - before >= 4, told
            one.end(kept)
            await until(lambda: sum(two.in_flight()) == 0)
        finally:
            await members.stop()
            await sentinel.kill()
            await replica.kill()

    with_redis(scenario, *SOON)


def test_cluster() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        await server.ask("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)

        async def is_well() -> bool:
            info = await server.ask("CLUSTER", "INFO")
            return b"cluster_state:ok" in bytes(info)  # type: ignore[arg-type]

        async with asyncio.timeout(10.0):
            while not await is_well():  # noqa: ASYNC110 - only the server knows
                await asyncio.sleep(0.02)
        one, _ = await shares(members, server.url, cluster=True)
        one.end(one.send(5))
        late = await members.start(cluster=True)
        assert await late.warmed_from() and late.knows(5)

    # The cluster's own port would else be 10,000 higher, which may be no port at all.
    with_redis(scenario, "--cluster-enabled", "yes", "--cluster-port", FREE_PORT, **PATIENT)
