"""Whatever becomes of Redis, requests go on; each change is one log line; recovery needs no restart."""

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from router.config import load_config
from router.proxy.assembly import Router
from router.state.news_writer import stream_name
from tests.fakes.redis_server import RedisServer, needs_redis, redis_server
from tests.state.members import QUICK, Member, Members, until, with_redis

pytestmark = needs_redis


def sharing(*members: Member) -> Callable[[], bool]:
    return lambda: all(
        m.report.state == "sharing" and len(m.report.peers) == len(members) - 1 for m in members
    )


def state_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    lines = [r.getMessage() for r in caplog.records if r.name == "warmroute.state"]
    return [line for line in lines if line.startswith("shared state in")]


async def busy(member: Member, seconds: float, first: int = 0) -> range:
    """A request all the time, each with a prompt of its own: the names of these prompts."""
    stop, name = time.monotonic() + seconds, first
    while time.monotonic() < stop:
        member.end(member.send(name))
        name += 1
        await asyncio.sleep(0.002)
    return range(first, name)


def knows_all(member: Member, names: range) -> Callable[[], bool]:
    return lambda: all(member.knows(name) for name in names)


def test_frozen_and_thawed(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        kept = one.send(90_000)
        await until(lambda: sum(two.in_flight()) == 1)
        caplog.clear()
        server.freeze()
        sent_meanwhile = [one.send(name) for name in range(5)]
        early = await busy(one, 0.2, 5)
        late = await busy(one, 2.3, early.stop)  # several attempts to tell of the early ones fail meanwhile
        assert one.report.state == two.report.state == "cut_off" and one.report.fault
        await until(lambda: not two.report.peers)
        assert sum(two.in_flight()) == 0, "what is not heard of is not counted for ever"
        server.thaw()
        await until(sharing(one, two), limit_s=10.0)
        await until(lambda: two.in_flight() == one.in_flight() and sum(two.in_flight()) == 6)
        await until(knows_all(two, early))
        await until(knows_all(two, late))
        for flight in (kept, *sent_meanwhile):
            one.end(flight)
        await until(lambda: sum(two.in_flight()) == 0)
        lines = state_lines(caplog)
        assert len(lines) == 4 and sum("no answer in time" in line for line in lines) == 2
        assert one.report.changes == two.report.changes == 3

    with caplog.at_level(logging.INFO, "warmroute.state"):
        with_redis(scenario)


def test_K09_killed_and_back_empty(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        flights = [one.send(name) for name in range(3)] + [two.send(name) for name in range(10, 14)]
        await until(lambda: one.in_flight() == two.in_flight() and sum(one.in_flight()) == 7)
        caplog.clear()
        await server.kill()
        await until(lambda: one.report.state == two.report.state == "cut_off")
        prompts = await busy(one, 1.5, 20)  # the leases end
        back_at = time.monotonic()
        await server.start()
        await until(sharing(one, two))
        await until(lambda: one.in_flight() == two.in_flight() and sum(one.in_flight()) == 7)
        await until(knows_all(two, prompts))
        assert time.monotonic() - back_at < 10.0
        for number, flight in enumerate(flights):
            (one if number < 3 else two).end(flight)
        await until(lambda: sum(one.in_flight()) == sum(two.in_flight()) == 0)
        assert len(state_lines(caplog)) == 4 and any(
            "cannot be reached" in one for one in state_lines(caplog)
        )

    with caplog.at_level(logging.INFO, "warmroute.state"):
        with_redis(scenario, timeout_ms=5_000.0)  # a slow machine is no fault


def test_not_there_at_the_start_and_there_later() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        await server.kill()
        began = time.monotonic()
        one, two = await members.start(), await members.start()
        assert time.monotonic() - began < 5.0
        one.end(one.send(1))
        await until(lambda: one.report.state == "cut_off")
        await server.start()
        await until(sharing(one, two))

    with_redis(scenario)


def test_full_memory_stops_telling_not_hearing(caplog: pytest.LogCaptureFixture) -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        caplog.clear()
        await server.ask("CONFIG", "SET", "maxmemory", 1)
        flight = one.send(1)
        await until(lambda: one.report.state == two.report.state == "mute")
        assert "memory is full" in (one.report.fault or "")
        prompts = await busy(one, 0.7, 20)
        await server.ask("CONFIG", "SET", "maxmemory", 0)
        await until(sharing(one, two))
        await until(lambda: sum(two.in_flight()) == 1)
        await until(knows_all(two, prompts))
        one.end(flight)
        assert len(state_lines(caplog)) == 4

    with caplog.at_level(logging.INFO, "warmroute.state"):
        with_redis(scenario, "--maxmemory-policy", "noeviction")


def test_everything_flushed_under_way() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        for round_ in range(5):
            flight = one.send(round_)
            await server.ask("FLUSHALL")
            await until(lambda: sum(two.in_flight()) == 1)
            one.end(flight)
            await server.ask("FLUSHALL")
            await until(lambda: sum(two.in_flight()) == 0)

    with_redis(scenario)


def test_a_clock_that_is_set_back_makes_nobody_deaf() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        stream, ahead = stream_name(one.config.state), 4_000_000_000_000
        await server.ask("XADD", stream, f"{ahead}-0", "b", "told while the clock was ahead")
        await until(lambda: one.report.malformed == two.report.malformed == 1)
        await server.ask("DEL", stream)  # evicted; entries are named by the time that it is now
        flight = one.send(1)
        await until(lambda: sum(two.in_flight()) == 1)
        one.end(flight)
        await until(lambda: two.report.malformed == 1 and sum(two.in_flight()) == 0)

    with_redis(scenario)


@pytest.mark.parametrize("password", [None, "wrong-canary"])
def test_B048_wrong_credentials_are_named_and_not_shown(
    password: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        keys = {} if password is None else {"password": password}
        one = await members.start(**keys)
        await until(lambda: one.report.state == "cut_off")
        one.end(one.send(1))
        await asyncio.sleep(0.5)
        (line,) = state_lines(caplog)
        assert "refuses the credentials" in line and "state.password" in line
        assert "canary" not in caplog.text
        good = await members.start(password="right")
        await until(lambda: good.report.state == "sharing")

    with caplog.at_level(logging.DEBUG, "warmroute"):
        with_redis(scenario, "--requirepass", "right")


@pytest.mark.parametrize("says", [b"-DENIED protected mode\r\n", b"-ERR max number of clients\r\n", b""])
def test_a_store_that_hangs_up_at_once_is_told_from_one_that_is_not_there(says: bytes) -> None:
    async def hang_up(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(says)
        writer.close()

    async def scenario() -> None:
        async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as server:
            members = Members()
            port = server.sockets[0].getsockname()[1]
            try:
                one = await members.start(url=f"redis://127.0.0.1:{port}")
                await until(lambda: one.report.state == "cut_off")
                assert "closes the connection" in (one.report.fault or "")
                assert "protected mode" in (one.report.fault or "")
            finally:
                await members.stop()

    asyncio.run(scenario())


def test_a_new_password_is_taken_without_a_restart(tmp_path: Path) -> None:
    async def scenario(server: RedisServer) -> None:
        secret, file = tmp_path / "password", tmp_path / "router.yaml"
        secret.write_text("old")
        state = {"kind": "redis", "url": server.url, "password": {"file": str(secret)}, **QUICK}
        listens = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
        replicas = [{"url": "http://127.0.0.1:9"}]
        file.write_text(yaml.safe_dump({**listens, "replicas": replicas, "state": state}))
        router = Router(load_config(file), load=lambda: load_config(file))
        await router.start()
        try:
            await until(lambda: router.state.report().state == "sharing")
            await server.ask("CONFIG", "SET", "requirepass", "new", password="old")
            await server.ask("CLIENT", "KILL", "TYPE", "normal", password="new")
            await until(lambda: router.state.report().state == "cut_off")
            secret.write_text("new")
            await router.reload()
            await until(lambda: router.state.report().state == "sharing")
        finally:
            await router.stop()

    async def main() -> None:
        async with redis_server("--requirepass", "old") as server:
            await scenario(server)

    asyncio.run(main())


def test_acl_users_may_do_what_is_documented_and_no_more() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        commands = ["+xadd", "+xread", "+xrevrange", "+expire", "+rpush", "+blpop", "+llen"]
        await server.ask("ACL", "SETUSER", "router", "on", ">secret", "~warmroute:*", *commands)
        one = await members.start(username="router", password="secret")
        one.end(one.send(1))
        two = await members.start(username="router", password="secret")
        await until(sharing(one, two))
        assert await two.warmed_from() == one.report.router and two.knows(1)
        await server.ask("ACL", "SETUSER", "router", "-xadd")
        await until(lambda: one.report.state == "mute")
        assert "ACL" in (one.report.fault or "")

    with_redis(scenario)


def test_a_read_only_replica_is_named_and_becoming_master_is_enough(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        replica = RedisServer("--replicaof", "127.0.0.1", str(server.port), "--repl-diskless-sync-delay", "0")
        await replica.start()
        try:
            await replica.until_role("slave")
            one = await members.start(url=replica.url)
            await until(lambda: one.report.state == "mute")
            assert "read-only" in (one.report.fault or "")
            one.end(one.send(1))
            await server.kill()
            await replica.ask("REPLICAOF", "NO", "ONE")
            await until(lambda: one.report.state == "sharing")
            lines = state_lines(caplog)
            assert len(lines) == one.report.changes <= 3 and "read-only" in lines[-2], lines
            two = await members.start(url=replica.url)
            await until(sharing(one, two))
        finally:
            await members.stop()
            await replica.kill()

    with caplog.at_level(logging.INFO, "warmroute.state"):
        with_redis(scenario, "--repl-diskless-sync-delay", "0")


def test_B084_no_scripts_are_needed_and_none_can_get_lost() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        rights = ["allkeys", "allchannels", "+@all", "-@scripting"]
        await server.ask("ACL", "SETUSER", "router", "on", ">secret", *rights)
        one = await members.start(username="router", password="secret")
        two = await members.start(username="router", password="secret")
        await until(sharing(one, two))
        for round_ in range(5):
            flight = one.send(round_)
            await server.ask("SCRIPT", "FLUSH")
            await until(lambda: sum(two.in_flight()) == 1)
            one.end(flight)
            await until(lambda: sum(two.in_flight()) == 0)
        assert one.report.changes == two.report.changes == 1

    with_redis(scenario)


def test_B093_a_store_that_stalls_empties_no_routing_table_and_the_dead_do_not_stay() -> None:
    async def scenario(server: RedisServer, members: Members) -> None:
        one, two = await members.pair()
        lease_s = one.config.state.lease_s
        server.freeze()
        frozen_at = time.monotonic()
        while time.monotonic() - frozen_at < 2 * lease_s:
            await busy(one, 0.1)
            assert [replica.usable for replica in one.fleet.replicas] == [True, True]
        server.thaw()
        await until(sharing(one, two))
        left = two.send(5)
        await until(lambda: sum(one.in_flight()) == 1)
        two.vanish()
        gone_at = time.monotonic()
        await until(lambda: not one.report.peers)
        assert time.monotonic() - gone_at < 2 * lease_s + 1.0 and sum(one.in_flight()) == 0
        assert not left.over, "nobody told it"

    with_redis(scenario)
