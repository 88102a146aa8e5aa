"""A ``warmroute serve`` process in front of fake replicas, for what only a process shows: signals, exit."""

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tests.fakes.fake_replica import FakeReplica
from tests.fakes.proxy_rig import CHAT, until
from tests.fakes.raw_client import RawAnswer, RawClient

START_LIMIT_S = 30.0
ROOT = Path(__file__).resolve().parents[2]


@dataclass
class RouterProcess:
    """One running router."""

    process: asyncio.subprocess.Process
    address: str
    admin: str
    log: list[str] = field(default_factory=list)
    """Lines it has written, as far as they were read."""
    following: "asyncio.Task[None] | None" = None
    """Reads them."""

    async def ask(
        self, body: bytes | dict[str, Any] = CHAT, path: str = "/v1/chat/completions", **fields: Any
    ) -> RawAnswer:
        """One request on a connection of its own."""
        client = await RawClient.connect(self.address)
        try:
            await client.post(body, path, **fields)
            return await client.answer()
        finally:
            client.leave()

    async def get(self, path: str) -> RawAnswer:
        """GET on the public port."""
        return await self.ask(b"", path, method="GET")

    async def exit_code(self, limit_s: float = 10.0) -> int:
        """Wait until it has ended and all that it wrote was read."""
        assert self.following is not None
        async with asyncio.timeout(limit_s):
            await asyncio.shield(self.following)
            return await self.process.wait()

    async def follow_log(self, stderr: asyncio.StreamReader) -> None:
        """Collect its lines until it ends."""
        while line := await stderr.readline():
            self.log.append(line.decode().rstrip())


@asynccontextmanager
async def router_process(
    folder: Path,
    replicas: Sequence[FakeReplica | str],
    *,
    command: str = "serve",
    under: Sequence[str] = (),
    **keys: Any,
) -> AsyncIterator[RouterProcess]:
    """Start a router from a file in ``folder``, before ``replicas`` or URLs; killed at the end if it still
    runs. ``under``: a command that runs the one behind it in its own place."""
    config = folder / "router.yaml"
    urls = [replica if isinstance(replica, str) else replica.url for replica in replicas]
    named = [{"url": url, "name": f"r{index}"} for index, url in enumerate(urls)]
    addresses = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0"}
    config.write_text(yaml.safe_dump(addresses | {"replicas": named} | keys))
    process = await asyncio.create_subprocess_exec(
        *(*under, sys.executable, "-m", "warmroute", command, str(config)),
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    router = RouterProcess(process, "", "")
    assert process.stderr is not None
    router.following = asyncio.create_task(router.follow_log(process.stderr))
    try:
        following = router.following
        await until(
            lambda: following.done() or any("listening on" in line for line in router.log), START_LIMIT_S
        )
        assert not following.done(), router.log
        (line,) = (line for line in router.log if "listening on" in line)
        found = re.search(r"listening on (\S+) \(admin (\S+)\)", line)
        assert found is not None, line
        router.address, router.admin = found.groups()
        yield router
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await router.following
