"""A router process in front of quick replicas, and what can be seen of the router from outside."""

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import yaml

from sim.demo.processes import Child, ChildProcesses, free_ports

START_LIMIT_S = 30.0
REPLICAS = 3
PAGE_KIB = os.sysconf("SC_PAGE_SIZE") / 1024


@dataclass(frozen=True, slots=True)
class MeasuredRouter:
    """A running router."""

    address: str
    admin_url: str
    child: Child

    def rss_mib(self) -> float:
        """Its resident memory."""
        pages = int(Path(f"/proc/{self.child.pid}/statm").read_text(encoding="ascii").split()[1])
        return pages * PAGE_KIB / 1024

    async def fleet(self) -> dict[str, Any]:
        """``/fleet``."""
        async with aiohttp.ClientSession() as session, session.get(self.admin_url + "/fleet") as answer:
            state: dict[str, Any] = await answer.json()
            return state


@asynccontextmanager
async def measured_fleet(
    folder: Path, *, hold_s: float = 0.0, module: str = "warmroute", arguments: tuple[str, ...] = ("serve",)
) -> AsyncIterator[MeasuredRouter]:
    """Three quick replicas and a router (``python -m MODULE ARGUMENTS CONFIG``), stopped at the end."""
    *ports, public, admin = free_ports(REPLICAS + 2)
    listen, admin_address = f"127.0.0.1:{public}", f"127.0.0.1:{admin}"
    config = folder / "router.yaml"
    urls = [{"url": f"http://127.0.0.1:{port}", "name": f"r{at}"} for at, port in enumerate(ports)]
    config.write_text(yaml.safe_dump({"listen": listen, "admin": admin_address, "replicas": urls}))
    with ChildProcesses(folder) as children:
        for at, port in enumerate(ports):
            flags = ("--port", str(port), "--hold-s", str(hold_s))
            child = children.start(f"r{at}", [sys.executable, "-m", "tests.load.quick_replica", *flags])
            await children.wait_ready(child, f"http://127.0.0.1:{port}/health", START_LIMIT_S)
        router = children.start("router", [sys.executable, "-m", module, *arguments, str(config)])
        await children.wait_ready(router, f"http://{listen}/readiness", START_LIMIT_S)
        yield MeasuredRouter(listen, f"http://{admin_address}", router)
