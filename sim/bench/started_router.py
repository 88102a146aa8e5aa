"""A router under test, started before replicas and answering."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from sim.bench.prompts import chat_body
from sim.bench.routers import Router
from sim.demo.processes import Child, ChildError, ChildProcesses, free_ports

START_LIMIT_S = 60.0
POLL_EVERY_S = 0.1


@dataclass(frozen=True, slots=True)
class StartedRouter:
    """It listens on ``port`` of loopback."""

    router: Router
    child: Child
    port: int


async def start_router(
    router: Router, replicas: Sequence[str], children: ChildProcesses, folder: Path
) -> StartedRouter:
    """Start ``router`` before ``replicas`` (URLs); its files go to a new folder in ``folder``.

    Returns when a chat request through it was answered. Raises ``ChildError``; it is stopped then.
    """
    (port,) = free_ports(1)
    name = router.name.replace(" ", "-")
    own = folder / name
    own.mkdir()
    child = children.start(name, router.command_line(port, replicas, own))
    try:
        await _until_routed(child, port)
    except ChildError:
        children.stop([child])
        raise
    return StartedRouter(router, child, port)


async def _until_routed(child: Child, port: int) -> None:
    body = chat_body(0, 1, 1, stream=False)
    deadline = time.monotonic() + START_LIMIT_S
    headers = {"content-type": "application/json"}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=3.0), headers=headers) as session:
        while time.monotonic() < deadline:
            if child.exit_code is not None:
                raise child.died()
            try:
                async with session.post(url, data=body) as answer:
                    if answer.status == 200:
                        return
            except (aiohttp.ClientError, TimeoutError):
                pass
            await asyncio.sleep(POLL_EVERY_S)
    raise ChildError(
        f"no answer within {START_LIMIT_S:.0f} s; the end of its log:\n{child.tail() or '(empty)'}"
    )
