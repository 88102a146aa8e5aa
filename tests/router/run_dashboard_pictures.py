"""The dashboard's pictures in docs/: two routers that share, emulated replicas under chat load, Chromium.

::

    python -m tests.router.run_dashboard_pictures docs

Of six replicas one is drained, one is dead; some sessions talk of the same documents. Needs redis-server and
Chromium.
"""

import argparse
import asyncio
import base64
import random
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import uvloop

from router.config import parse_config
from router.proxy.assembly import Router
from sim.demo.processes import ChildProcesses, free_ports
from tests.fakes.chromium import Page, chromium
from tests.fakes.redis_server import redis_server

REPLICAS = 5
SESSIONS = 40
SECONDS = 75
TENANTS = (("search", {"concurrent": 16}), ("support", {"requests_per_s": 3}))
DOCUMENTS = ("handbook", "price list", "style guide")
PICTURES = (("dashboard.png", 1420, 980, False), ("dashboard-dark.png", 1420, 980, True))
PHONE = ("dashboard-phone.png", 390, 844, False)


async def talk(url: str, session: int) -> None:
    """One chat after another: a shared document, then turns that grow."""
    rng = random.Random(session)
    tenant, _ = TENANTS[session % 3 == 0]
    async with aiohttp.ClientSession(headers={"authorization": f"Bearer sk-{tenant}"}) as http:
        while True:
            document = DOCUMENTS[min(rng.randrange(5), 2)]
            messages = [{"role": "system", "content": f"{document} " * rng.choice((1_500, 3_000))}]
            for turn in range(rng.randrange(3, 9)):
                says = f"{session} {turn} {rng.random()} " * rng.randrange(5, 60)
                messages.append({"role": "user", "content": says})
                body = {
                    "model": "mock",
                    "messages": messages,
                    "stream": True,
                    "max_tokens": rng.randrange(20, 200),
                }
                async with http.post(url, json=body) as answer:
                    await answer.read()
                messages.append({"role": "assistant", "content": f"answer {turn} {session} " * 20})
                await asyncio.sleep(rng.uniform(0.5, 3.0))


@asynccontextmanager
async def routers(replicas: list[int], redis: str) -> AsyncIterator[list[Router]]:
    """Two of them; the last replica is not there."""
    named = [
        {
            "url": f"http://127.0.0.1:{port}",
            "name": f"gpu-{number}",
            "tags": ["h100" if number < 4 else "l40s"],
        }
        for number, port in enumerate(replicas)
    ]
    made: list[Router] = []
    for number in range(2):
        config = {
            "listen": "127.0.0.1:0",
            "admin": "127.0.0.1:0",
            "replicas": [*named, {"url": "http://127.0.0.1:9", "name": f"gpu-{REPLICAS}", "tags": ["l40s"]}],
            "state": {"kind": "redis", "url": redis},
            "tenants": {
                "salt_secret": "made-up-for-pictures-only",
                "routers": 2,
                "members": [
                    {"name": name, "keys": [f"sk-{name}"], "limits": limits} for name, limits in TENANTS
                ],
            },
            "shutdown_timeout_s": 0.1,
        }
        router = Router(parse_config(config, f"router {number}"))
        await router.start()
        made.append(router)
    try:
        yield made
    finally:
        for router in made:
            await router.stop()


async def taken(page: Page) -> bytes:
    """What the window shows, as PNG."""
    return base64.b64decode((await page.call("Page.captureScreenshot", format="png"))["data"])


async def draw() -> dict[str, bytes]:
    """Pictures by file name."""
    pictures: dict[str, bytes] = {}
    ports = free_ports(REPLICAS)
    with tempfile.TemporaryDirectory() as name, ChildProcesses(Path(name)) as children:
        command = [sys.executable, "-P", "-m", "sim.bench.emulated_replicas", "1", *map(str, ports)]
        child = children.start("replicas", command)
        for port in ports:
            await children.wait_ready(child, f"http://127.0.0.1:{port}/health", 20.0)
        async with redis_server() as redis, routers(ports, redis.url) as both:
            talks = [
                asyncio.create_task(
                    talk(f"http://{both[session % 4 == 0].data_plane.address}/v1/chat/completions", session)
                )
                for session in range(SESSIONS)
            ]
            async with chromium(f"http://{both[0].admin.address}/dashboard") as page:
                await page.size(1420, 980)
                await asyncio.sleep(SECONDS / 2)
                both[0].fleet.drained(3, both[0].data_plane.service.clock())
                await asyncio.sleep(SECONDS / 2)
                for file, width, height, dark in PICTURES:
                    await page.size(width, height, dark=dark)
                    await page.evaluate("scrollTo(0, 0)")
                    pictures[file] = await taken(page)
                await page.size(1420, 1300)
                await page.evaluate("byId('decisions-title').scrollIntoView()")
                pictures["dashboard-decisions.png"] = await taken(page)
                await page.size(1420, 420)
                await page.evaluate("byId('tenants-title').scrollIntoView()")
                pictures["dashboard-tenants.png"] = await taken(page)
                file, width, height, dark = PHONE
                await page.size(width, height, dark=dark)
                await page.evaluate("scrollTo(0, 0)")
                pictures[file] = await taken(page)
                assert not page.problems, page.problems
            for one in talks:
                one.cancel()
            await asyncio.gather(*talks, return_exceptions=True)
    return pictures


def main() -> None:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the PNG files go")
    folder: Path = parser.parse_args().folder
    for file, picture in uvloop.run(draw()).items():
        (folder / file).write_bytes(picture)


if __name__ == "__main__":
    main()
