"""A router whose config is loaded again, and what is seen of its fleet."""

from collections.abc import Awaitable, Callable
from typing import Any

from tests.fakes.router_rig import RouterRig, with_router

QUICK_SWEEP = {"client_header_s": 0.2, "replica_keepalive_s": 60.0}


def run(scenario: Callable[[RouterRig], Awaitable[None]], **options: Any) -> None:
    """With two replicas, of which the first config has r0 alone."""
    defaults = {"replicas": 2, "known": 1, "expose_routing": True, "timeouts": QUICK_SWEEP}
    with_router(scenario, **{**defaults, **options})  # type: ignore[arg-type]


async def join(rig: RouterRig, number: int = 1) -> None:
    """``replicas[number]`` joins r0, and is well."""
    await rig.reload(rig.entry(0), rig.entry(number))
    await rig.until_health(f"r{number}", "healthy")


def in_fleet(rig: RouterRig) -> list[str]:
    """Names of those there are, those on their way out included."""
    return [replica.name for replica in rig.router.fleet.replicas]


async def metrics(rig: RouterRig) -> str:
    return (await rig.admin("/metrics")).body.decode()
