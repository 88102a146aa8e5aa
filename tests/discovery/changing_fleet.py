"""A router whose replicas come and go while requests are asked of it, each of which must be answered."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.fakes.proxy_rig import until
from tests.fakes.router_rig import RouterRig, with_router


def run(scenario: Callable[[RouterRig], Awaitable[None]], **options: Any) -> None:
    """With three fake replicas, of which the config has r0 alone."""
    defaults = {"replicas": 3, "known": 1, "expose_routing": True}
    quick = {"timeouts": {"client_header_s": 0.2, "replica_keepalive_s": 60.0}}
    with_router(scenario, **{**defaults, **quick, **options})  # type: ignore[arg-type]


@asynccontextmanager
async def traffic(rig: RouterRig) -> AsyncIterator[None]:
    """Requests, one after the other, until the block ends; every one of them must be answered with 200."""
    statuses: list[int] = []
    over = asyncio.Event()

    async def ask() -> None:
        while not over.is_set():
            statuses.append((await rig.ask()).status)

    task = asyncio.create_task(ask())
    try:
        yield
        asked = len(statuses)
        await until(lambda: len(statuses) > asked + 3)
    finally:
        over.set()
        await task
    assert set(statuses) == {200}


def names(rig: RouterRig) -> set[str]:
    """Those that take new requests."""
    return {one.name for one in rig.router.fleet.replicas if one.usable and not one.leaving and one.probed}


async def until_there_are(rig: RouterRig, *expected: str) -> None:
    """Wait until these and no others take requests, and those that left are forgotten."""
    await until(lambda: names(rig) == set(expected) and len(rig.router.fleet.replicas) == len(expected))
