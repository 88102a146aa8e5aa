"""The admin port, the prober and a router put together, in front of aiohttp replicas on real sockets."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop
from aiohttp import web
from prometheus_client.parser import text_string_to_metric_families

from router.config import load_config
from router.proxy.assembly import Router
from router.proxy.explanation import lines
from tests.fakes.router_rig import RouterRig, with_router

LIMIT_S = 10.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hello " * 300}]}
METRICS = """vllm:num_requests_running{model_name="m"} 1.0
vllm:kv_cache_usage_perc{model_name="m"} 0.5
vllm:cache_config_info{block_size="16",num_gpu_blocks="500"} 1.0
"""


class Replica:
    """An OpenAI-shaped server that can be told to be ill."""

    def __init__(self) -> None:
        self.healthy = True
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/chat/completions", self._chat)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", self.port).start()
        self.port = self._runner.addresses[0][1]

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "m", "object": "model"}]})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=METRICS)

    async def _chat(self, request: web.Request) -> web.Response:
        await request.read()
        usage = {"prompt_tokens": 500, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 0}}
        message = {"role": "assistant", "content": "hi"}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        return web.json_response({"object": "chat.completion", "choices": [choice], "usage": usage})


class Bench:
    """A router from a file, two replicas, and a client."""

    def __init__(
        self, router: Router, replicas: list[Replica], file: Path, http: aiohttp.ClientSession
    ) -> None:
        self.router = router
        self.replicas = replicas
        self.file = file
        self._http = http

    async def admin(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self._http.request(
            method, f"http://{self.router.admin.address}{path}", **options
        ) as answer:
            if answer.content_type == "application/json":
                return answer.status, await answer.json()
            return answer.status, await answer.text()

    async def chat(self, **body: Any) -> aiohttp.ClientResponse:
        url = f"http://{self.router.data_plane.address}/v1/chat/completions"
        async with self._http.post(url, json=CHAT | body) as answer:
            await answer.read()
            return answer

    async def state(self, name: str) -> dict[str, Any]:
        _, fleet = await self.admin("GET", "/fleet")
        return next(replica for replica in fleet["replicas"] if replica["name"] == name)


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LIMIT_S
    while not await condition():
        assert loop.time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.02)


def config_text(replicas: list[Replica], policy: str = "round_robin") -> str:
    urls = "".join(
        f"  - url: http://127.0.0.1:{replica.port}\n    name: r{index}\n"
        for index, replica in enumerate(replicas)
    )
    return (
        f"listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nreplicas:\n{urls}policy:\n  kind: {policy}\n"
        "health:\n  interval_s: 0.05\n  backoff_s: 0.1\nexpose_routing: true\nseed: 1\n"
    )


@asynccontextmanager
async def bench(folder: Path, *, down: int = 0) -> AsyncIterator[Bench]:
    replicas = [Replica(), Replica()]
    for replica in replicas:
        await replica.start()
    for replica in replicas[:down]:
        await replica.stop()
    file = folder / "router.yaml"
    file.write_text(config_text(replicas))
    router = Router(load_config(file), lambda: load_config(file))
    await router.start()
    async with aiohttp.ClientSession() as http:
        try:
            yield Bench(router, replicas, file, http)
        finally:
            await router.stop()
            for replica in replicas:
                await replica.stop()


def run(folder: Path, scenario: Callable[[Bench], Awaitable[None]], **options: int) -> None:
    async def main() -> None:
        async with bench(folder, **options) as ready:
            await scenario(ready)

    uvloop.run(main())


def test_both_ports_on_unix_sockets(tmp_path: Path) -> None:
    public, admin = tmp_path / "public", tmp_path / "admin"

    async def scenario(rig: RouterRig) -> None:
        assert rig.router.data_plane.address == f"unix:{public}"
        assert (await rig.ask()).status == 200
        assert (await rig.admin("/fleet")).status == 200
        assert public.is_socket() and admin.is_socket()

    for _ in range(2):  # the second finds what the first left, and is not disturbed by it
        with_router(scenario, listen=f"unix:{public}", admin=f"unix:{admin}")


def test_metrics_are_valid_and_bounded(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        for number in range(30):
            await ready.chat(model="m" if number % 2 else f"made-up-{number}")
        _, page = await ready.admin("GET", "/metrics")
        families = {family.name: family for family in text_string_to_metric_families(page)}
        assert all(family.documentation for family in families.values())
        requests = {
            (sample.labels["replica"], sample.labels["status"]): sample.value
            for sample in families["warmroute_requests"].samples
        }
        assert requests[("", "404")] == 15
        assert requests[("r0", "200")] + requests[("r1", "200")] == 15
        assert "made-up" not in page
        held = families["warmroute_replica_held"].samples
        assert {sample.labels["replica"] for sample in held} == {"r0", "r1"}

    run(tmp_path, scenario)


def test_fleet_state_shows_what_replicas_told(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        await ready.chat()
        state = await ready.state("r0")
        assert state["models"] == ["m"] and state["health"] == "healthy"
        assert state["reported"]["capacity_tokens"] == 8_000
        assert state["queued"] == state["decoding"] == state["held"] == 0

    run(tmp_path, scenario)


def test_explain_agrees_with_the_next_request(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        for _ in range(5):
            status, told = await ready.admin("POST", "/explain", json=CHAT)
            assert status == 200 and len(told["candidates"]) == 2
            answer = await ready.chat()
            assert answer.headers["x-warmroute-replica"] == told["replica"]
        for junk, says in (
            (b"", "not a JSON object"),
            (b"[]", "not a JSON object"),
            (b"{", "not a JSON object"),
            (b'{"model":"m"}', "no prompt found"),
        ):
            status, error = await ready.admin("POST", "/explain", data=junk)
            assert status == 400 and says in error["error"]["message"]

    run(tmp_path, scenario)


def test_explain_names_who_is_no_candidate_and_why(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        async def told() -> tuple[str, list[dict[str, str]]]:
            _, answer = await ready.admin("POST", "/explain", json=CHAT)
            return answer["reason"], answer["left_out"]

        assert (await told())[1] == []
        await ready.admin("POST", "/drain/r0")
        assert await told() == ("only", [{"replica": "r0", "reason": "draining"}])
        assert "left out: r0 (draining)" in lines((await ready.admin("POST", "/explain", json=CHAT))[1])
        await ready.admin("DELETE", "/drain/r0")
        ready.replicas[0].healthy = False

        async def ejected() -> bool:
            return await told() == ("only", [{"replica": "r0", "reason": "ejected"}])

        await until(ejected)
        ready.router.fleet.models_reported(0, frozenset({"another"}))
        assert await told() == ("only", [{"replica": "r0", "reason": "other model"}])

    run(tmp_path, scenario)


def test_draining_and_back(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        assert (await ready.admin("POST", "/drain/r0"))[0] == 200
        assert {(await ready.chat()).headers["x-warmroute-replica"] for _ in range(4)} == {"r1"}
        assert (await ready.admin("DELETE", "/drain/r0"))[0] == 200
        assert {(await ready.chat()).headers["x-warmroute-replica"] for _ in range(4)} == {"r0", "r1"}
        status, error = await ready.admin("POST", "/drain/nobody")
        assert status == 404 and "r0, r1" in error["error"]["message"]

    run(tmp_path, scenario)


def test_reload_whole_or_not_at_all(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        for broken in ("", "replicas: [", "listen: 8080\n", config_text(ready.replicas) + "polcy: 1\n"):
            ready.file.write_text(broken)
            status, error = await ready.admin("POST", "/reload")
            assert status == 400 and error["error"]["message"]
            assert ready.router.config.policy.kind == "round_robin"
            assert (await ready.chat()).headers["x-warmroute-reason"] == "balanced"
        ready.file.write_text(config_text(ready.replicas, "predicted_finish"))
        assert (await ready.admin("POST", "/reload"))[0] == 200
        await ready.chat()
        assert (await ready.chat()).headers["x-warmroute-reason"] in ("warm", "cold", "spill")

    run(tmp_path, scenario)


def test_an_ill_replica_is_ejected_logged_and_comes_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario(ready: Bench) -> None:
        async def health_is(*states: str) -> bool:
            return (await ready.state("r0"))["health"] in states

        ready.replicas[0].healthy = False
        await until(lambda: health_is("ejected"))
        assert {(await ready.chat()).headers["x-warmroute-replica"] for _ in range(4)} == {"r1"}
        ready.replicas[0].healthy = True
        await until(lambda: health_is("probation"))
        await ready.chat()
        await ready.chat()
        await until(lambda: health_is("healthy"))
        lines = [record.getMessage() for record in caplog.records if record.name == "warmroute.prober"]
        health = ready.router.fleet.replicas[0].spec.url + "/health"
        assert [line for line in lines if "r0 is" in line][:2] == [
            "replica r0 is healthy",
            f"replica r0 is ejected: GET {health}: status 503",
        ]

    with caplog.at_level(logging.INFO, "warmroute.prober"):
        run(tmp_path, scenario)


def test_starts_with_a_replica_down_that_joins_later(tmp_path: Path) -> None:
    async def scenario(ready: Bench) -> None:
        assert {(await ready.chat()).headers["x-warmroute-replica"] for _ in range(4)} == {"r1"}
        await ready.replicas[0].start()

        async def both() -> bool:
            await ready.chat()
            return (await ready.state("r0"))["health"] == "healthy"

        await until(both)
        assert {(await ready.chat()).headers["x-warmroute-replica"] for _ in range(4)} == {"r0", "r1"}

    run(tmp_path, scenario, down=1)
