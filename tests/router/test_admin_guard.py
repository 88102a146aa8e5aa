"""An admin port without keys answers no web page but its own, whatever name led there; in a browser, too."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from tests.fakes.chromium import chromium, needs_chromium
from tests.fakes.router_rig import RouterRig, with_router

OURS = (
    {},
    {"Origin": "http://{address}", "Sec-Fetch-Site": "same-origin"},
    {"Sec-Fetch-Site": "none", "Sec-Fetch-Mode": "navigate"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
)
FOREIGN = (
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://["},
    {"Origin": "http://127.0.0.1:1"},
    {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "no-cors"},
    {"Sec-Fetch-Site": "same-site"},
)
ORDERS = (("/drain/r0", "POST"), ("/drain/r0", "DELETE"), ("/reload", "POST"), ("/replicas", "POST"))
QUESTIONS = (("/fleet", "GET"), ("/metrics", "GET"), ("/config", "GET"), ("/explain", "POST"))


async def _status(rig: RouterRig, host: str, path: str, method: str, fields: dict[str, str]) -> int:
    """Over a connection to the port itself, whatever ``Host`` says."""
    reader, writer = await asyncio.open_connection(*rig.router.admin.address.rsplit(":", 1))
    try:
        lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", "Content-Length: 0", "Connection: close"]
        lines += [f"{name}: {value}" for name, value in fields.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode())
        return int((await asyncio.wait_for(reader.readline(), 10.0)).split()[1])
    finally:
        writer.close()


@pytest.mark.parametrize(("path", "method"), [*ORDERS, *QUESTIONS])
def test_only_its_own_pages_may_ask(path: str, method: str) -> None:
    async def scenario(rig: RouterRig) -> None:
        address = rig.router.admin.address
        for fields in OURS:
            own = {name: value.format(address=address) for name, value in fields.items()}
            allowed = (await _status(rig, address, path, method, own)) != 403
            assert allowed or path == "/replicas", fields  # adding is off without admin_replicas: 403 as well
        for fields in FOREIGN:
            assert await _status(rig, address, path, method, fields) == 403, fields
        for host in ("evil.example", "evil.example:8081", "127.0.0.1.evil.example", ""):
            assert await _status(rig, host, path, method, {}) == 403, host
        assert not rig.router.fleet.replicas[0].draining or method == "POST"

    with_router(scenario)


def test_names_that_are_nobodys_domain_and_those_of_the_config_may_be_used() -> None:
    async def scenario(rig: RouterRig) -> None:
        for host in (
            "localhost:8081",
            "router-1:8081",
            "10.0.0.7",
            "[::1]:8081",
            "warm.localhost",
            "OPS.example.org.",
        ):
            assert await _status(rig, host, "/fleet", "GET", {}) == 200, host
        behind_a_proxy = {"Origin": "https://ops.example.org"}  # it ends TLS and sends another Host
        assert await _status(rig, "127.0.0.1:8081", "/fleet", "GET", behind_a_proxy) == 200
        assert await _status(rig, "127.0.0.1:8081", "/fleet", "GET", FOREIGN[0]) == 403
        await rig.reload(rig.entry(0), admin_hosts=[])
        assert await _status(rig, "ops.example.org", "/fleet", "GET", {}) == 403

    with_router(scenario, admin_hosts=["ops.example.org"])


def test_with_keys_the_key_decides() -> None:
    async def scenario(rig: RouterRig) -> None:
        key = {"Authorization": "Bearer sk-admin"}
        assert await _status(rig, "ops.example.org", "/fleet", "GET", key | FOREIGN[0]) == 200
        assert await _status(rig, "ops.example.org", "/fleet", "GET", {}) == 401

    with_router(scenario, keys={"admin": ["sk-admin"]})


@pytest.mark.parametrize("keys", [{}, {"admin": ["sk-admin"]}])
def test_the_root_leads_to_the_dashboard(keys: dict[str, list[str]]) -> None:
    async def scenario(rig: RouterRig) -> None:
        answer = await rig.admin("/")
        assert (answer.status, answer.field("location")) == (302, "/dashboard")

    with_router(scenario, keys=keys)


@asynccontextmanager
async def _page_of_somebody_else() -> AsyncIterator[str]:
    async def page(request: web.Request) -> web.Response:
        return web.Response(text="<p>hello</p>", content_type="text/html")

    app = web.Application()
    app.router.add_get("/", page)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


@needs_chromium
def test_a_page_in_a_browser_cannot_drain_a_replica() -> None:
    """A "simple" request: the browser sends it without asking first, and only hides the answer."""

    async def scenario(rig: RouterRig) -> None:
        async with _page_of_somebody_else() as url, chromium(url) as page:
            target = f"http://{rig.router.admin.address}/drain/r0"
            await page.evaluate(
                f"fetch('{target}', {{method: 'POST', mode: 'no-cors', body: 'x'}}).then(() => 1)"
            )
            assert not rig.router.fleet.replicas[0].draining
            assert any("403" in problem for problem in page.problems)

    with_router(scenario)
