"""What both backends promise: a restart is warm, what was in flight is forgotten, no store is needed."""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from tests.fakes.redis_server import REDIS, VALKEY, RedisServer, free_port, needs_redis, needs_valkey
from tests.state.members import QUICK, Member, until

BACKENDS = [
    "memory",
    pytest.param("redis", marks=needs_redis),
    pytest.param("valkey", marks=needs_valkey),
]
Scenario = Callable[[dict[str, Any]], Awaitable[None]]


def with_backend(kind: str, folder: Path, scenario: Scenario) -> None:
    """Run ``scenario`` with the config of a backend whose store is there."""

    async def main() -> None:
        if kind == "memory":
            await scenario({"kind": "memory", "snapshot": str(folder / "state")})
            return
        server = RedisServer(program=VALKEY if kind == "valkey" else REDIS)
        await server.start()
        other = Member({"kind": "redis", "url": server.url, **QUICK})  # what one knows, some other remembers
        await other.state.start()
        try:
            await scenario({"kind": "redis", "url": server.url, **QUICK})
        finally:
            await other.state.stop()
            await server.kill()

    asyncio.run(main())


async def started(state: dict[str, Any]) -> Member:
    member = Member(state)
    await member.state.start()
    return member


@pytest.mark.parametrize("kind", BACKENDS)
def test_a_restart_is_warm(kind: str, tmp_path: Path) -> None:
    async def scenario(state: dict[str, Any]) -> None:
        before = await started(state)
        for name in range(300):
            before.end(before.send(name))
        before.fleet.drained(0, time.monotonic())
        await before.has_told()
        await before.state.stop()
        after = await started(state)
        assert await after.warmed_from()
        assert all(after.knows(name) for name in range(300))
        await until(lambda: after.fleet.replicas[0].draining and not after.fleet.replicas[1].draining)
        after.fleet.drained(0, time.monotonic(), on=False)
        assert not after.fleet.replicas[0].draining
        after.fleet.index.check_invariants()
        await after.state.stop()

    with_backend(kind, tmp_path, scenario)


@pytest.mark.parametrize("kind", BACKENDS)
def test_what_was_in_flight_is_not_counted_after_a_restart(kind: str, tmp_path: Path) -> None:
    async def scenario(state: dict[str, Any]) -> None:
        before = await started(state)
        for name in range(20):
            before.send(name)
        await before.state.stop()
        after = await started(state)
        await until(lambda: after.in_flight() == [0, 0])
        await after.state.stop()

    with_backend(kind, tmp_path, scenario)


@pytest.mark.parametrize("kind", BACKENDS)
def test_the_report_fits_into_json(kind: str, tmp_path: Path) -> None:
    async def scenario(state: dict[str, Any]) -> None:
        member = await started(state)
        report = orjson.loads(orjson.dumps(asdict(member.report)))
        assert report["kind"] == state["kind"] and report["state"] and report["since_s"] >= 0.0
        await member.state.stop()

    with_backend(kind, tmp_path, scenario)


@pytest.mark.parametrize(
    "state",
    [
        {"kind": "memory"},
        {"kind": "memory", "snapshot": "/nonexistent/folder/state"},
        {"kind": "redis", "url": f"redis://127.0.0.1:{free_port()}", **QUICK},
    ],
)
def test_no_store_is_needed(state: dict[str, Any]) -> None:
    async def main() -> None:
        began = time.monotonic()
        member = await started(state)
        for name in range(50):
            member.end(member.send(name))
        await member.state.stop()
        assert time.monotonic() - began < 10.0 and member.in_flight() == [0, 0]
        assert member.knows(49)

    asyncio.run(main())
