"""configs/docker/haproxy.cfg in a real HAProxy, in front of two ``warmroute serve`` processes."""

import asyncio
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fakes.fake_replica import (
    DONE_EVENT,
    LAST_CHUNK,
    STREAM_HEAD,
    FakeReplica,
    Send,
    Wait,
    chunk,
    delta,
)
from tests.fakes.proxy_rig import CHAT_STREAM
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import free_port
from tests.fakes.router_process import RouterProcess, router_process

CONFIG = Path(__file__).resolve().parents[1] / "configs/docker/haproxy.cfg"
LIMIT_S = 20.0

pytestmark = pytest.mark.skipif(shutil.which("haproxy") is None, reason="needs haproxy")


@asynccontextmanager
async def _balancer(folder: Path, routers: Sequence[RouterProcess]) -> AsyncIterator[str]:
    """HAProxy with our config; only the addresses are those of this machine."""
    address = f"127.0.0.1:{free_port()}"
    text = CONFIG.read_text().replace("bind :8080", f"bind {address}")
    for number, router in enumerate(routers, 1):
        assert f"router-{number}:8080" in text
        text = text.replace(f"router-{number}:8080", router.address)
    file = folder / "haproxy.cfg"
    file.write_text(text)
    process = await asyncio.create_subprocess_exec("haproxy", "-db", "-f", str(file))
    try:
        await _until_ready(address)
        yield address
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _status(address: str, path: str) -> int:
    client = await RawClient.connect(address)
    try:
        await client.post(b"", path, method="GET")
        return (await client.answer()).status
    finally:
        client.leave()


async def _accepts(address: str) -> bool:
    try:
        await _status(address, "/readiness")
    except OSError:
        return False
    return True


async def _until_ready(address: str) -> None:
    deadline = asyncio.get_running_loop().time() + LIMIT_S
    while True:
        if await _accepts(address) and await _status(address, "/readiness") == 200:
            return
        assert asyncio.get_running_loop().time() < deadline, f"nothing is ready behind {address}"
        await asyncio.sleep(0.05)


def test_a_router_that_stops_ends_its_streams_and_nobody_is_refused(tmp_path: Path) -> None:
    async def scenario() -> None:
        gate = asyncio.Event()
        start, end = STREAM_HEAD + chunk(delta("hel")), chunk(delta("lo")) + chunk(DONE_EVENT) + LAST_CHUNK
        replica = FakeReplica()
        replica.default = [Send(start + end)]
        replica.plans.extend([[Send(start), Wait(gate), Send(end)]] * 2)
        await replica.start()
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        keys = {"shutdown_delay_s": 3.0, "shutdown_timeout_s": 10.0}
        try:
            async with (
                router_process(tmp_path / "a", [replica], **keys) as first,
                router_process(tmp_path / "b", [replica], **keys) as second,
                _balancer(tmp_path, [first, second]) as address,
            ):
                for router in (first, second):
                    await _until_ready(router.address)
                streams = [await RawClient.connect(address) for _ in range(2)]
                for stream in streams:  # fewest connections: one on each router
                    await stream.post(CHAT_STREAM)
                    assert (await stream.head()).status == 200
                first.process.terminate()
                while first.process.returncode is None:
                    client = await RawClient.connect(address)
                    await client.post(CHAT_STREAM)
                    assert (await client.answer()).status == 200
                    client.leave()
                    if not await _accepts(first.address):
                        gate.set()
                for stream in streams:
                    body = b""
                    while piece := await stream.chunk():
                        body += piece
                    assert body.endswith(DONE_EVENT)
                    stream.leave()
                assert first.process.returncode == 0
        finally:
            await replica.stop()

    asyncio.run(scenario())
