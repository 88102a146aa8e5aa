"""A whole router in front of fake replicas, all in one loop: data plane, prober and admin port.

``proxy_rig`` has the data plane alone; use this one where probes, ``/fleet`` or a reload matter.
"""

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import uvloop

from router.config import RouterConfig, parse_config
from router.proxy.assembly import Router
from router.proxy.data_plane import DataPlane
from router.proxy.request_path import MakeRequestPath
from tests.fakes.fake_replica import FakeReplica
from tests.fakes.proxy_rig import Asking, until
from tests.fakes.raw_client import RawAnswer, RawClient

QUICK_HEALTH = {"interval_s": 0.05, "timeout_s": 2.0, "backoff_s": 0.1}
"""Probes in quick succession; a machine that stands still for a second takes no replica out."""


class RouterRig(Asking):
    """What a scenario works with."""

    def __init__(
        self,
        replicas: list[FakeReplica],
        known: int,
        others: list[dict[str, Any]],
        keys: dict[str, Any],
        make_path: MakeRequestPath,
    ) -> None:
        self.replicas = replicas
        self._known = known
        self._others = others
        self._keys = keys
        self.next_config = self.config_with(**keys)
        """What a reload finds."""
        self.router = Router(self.next_config, lambda: self.next_config, make_path)
        self.clients: list[RawClient] = []

    def config_with(self, **keys: Any) -> RouterConfig:
        """A config of the known fake replicas, named r0, r1, …, unless ``keys`` has its own."""
        named = [self.entry(number) for number in range(self._known)]
        return parse_config(
            {
                "listen": "127.0.0.1:0",
                "admin": "127.0.0.1:0",
                "seed": 1,
                "replicas": [*named, *self._others],
            }
            | keys,
            "test",
        )

    def entry(self, number: int, **keys: Any) -> dict[str, Any]:
        """``replicas[number]`` as it stands in a config."""
        return {"url": self.replicas[number].url, "name": f"r{number}", **keys}

    async def try_reload(self, *entries: dict[str, Any], **keys: Any) -> RawAnswer:
        """Reload a config of these replicas, with ``keys`` over those the rig was made with."""
        self.next_config = self.config_with(**{**self._keys, **keys, "replicas": list(entries)})
        return await self.admin("/reload", "POST")

    async def reload(self, *entries: dict[str, Any], **keys: Any) -> None:
        """The same; it must be applied."""
        answer = await self.try_reload(*entries, **keys)
        assert answer.status == 200, answer.body

    @property
    def replica(self) -> FakeReplica:
        """The first."""
        return self.replicas[0]

    async def client(self) -> RawClient:
        """A new connection to the public port."""
        client = await RawClient.connect(self.router.data_plane.address)
        self.clients.append(client)
        return client

    async def answered_by(self, requests: int = 4) -> set[str | None]:
        """Which replicas answer the next requests; needs ``expose_routing``."""
        return {(await self.ask()).field("x-warmroute-replica") for _ in range(requests)}

    async def get(self, path: str, **fields: Any) -> RawAnswer:
        """GET on the public port."""
        return await self.ask(b"", path, method="GET", **fields)

    async def admin(self, path: str, method: str = "GET", body: bytes = b"", **fields: Any) -> RawAnswer:
        """One request to the admin port."""
        client = await RawClient.connect(self.router.admin.address)
        await client.post(body, path, method=method, **fields)
        answer = await client.answer()
        client.leave()
        return answer

    async def fleet(self) -> dict[str, dict[str, Any]]:
        """``/fleet``'s replicas by name."""
        state = (await self.admin("/fleet")).json()
        return {replica["name"]: replica for replica in state["replicas"]}

    async def until_health(self, name: str, *states: str) -> None:
        """Wait until the replica is in one of ``states``."""
        await until(lambda: self._health(name) in states)

    def _health(self, name: str) -> str:
        return next(one for one in self.router.fleet.replicas if one.name == name).health.state.value

    def at_rest(self) -> bool:
        """Nothing is in flight or booked anywhere."""
        ledgers = [replica.ledger for replica in self.router.fleet.replicas]
        return not (
            self.router.counters.in_flight
            or self.router.fleet.held
            or not all(quota.unused for quota in self.router.fleet.tenants.quotas.values())
            or any(ledger.queued or ledger.decoding or ledger.outstanding_tokens for ledger in ledgers)
        )


def with_router(
    scenario: Callable[[RouterRig], Awaitable[None]],
    *,
    replicas: int = 1,
    known: int | None = None,
    down: int = 0,
    others: Sequence[dict[str, Any]] = (),
    make_path: MakeRequestPath = DataPlane,
    before: Callable[[FakeReplica], None] = lambda fake: None,
    **config: Any,
) -> None:
    """Run ``scenario`` against a fresh router in front of ``replicas`` fakes and ``others``.

    The last ``down`` fakes do not listen at the start; the first ``known`` alone are in the first config.
    ``before``: done to each before the router starts. Afterwards everything must be released and nothing
    logged as an error.
    """
    config.setdefault("policy", {"kind": "round_robin"})
    config.setdefault("health", QUICK_HEALTH)
    config.setdefault("shutdown_timeout_s", 2.0)
    known = replicas if known is None else known
    uvloop.run(_run(scenario, replicas, known, down, list(others), config, make_path, before))


async def _run(
    scenario: Callable[[RouterRig], Awaitable[None]],
    count: int,
    known: int,
    down: int,
    others: list[dict[str, Any]],
    config: dict[str, Any],
    make_path: MakeRequestPath,
    before: Callable[[FakeReplica], None],
) -> None:
    errors: list[str] = []

    def failed(_: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if not _is_grpc_word_for_a_closed_loop(context):
            errors.append(repr(context))

    asyncio.get_running_loop().set_exception_handler(failed)
    handler = logging.Handler(logging.ERROR)
    handler.emit = lambda record: errors.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("warmroute").addHandler(handler)
    fakes = [FakeReplica() for _ in range(count)]
    for fake in fakes:
        before(fake)
        await fake.start()
    for fake in fakes[count - down :]:
        await fake.kill()
    rig = RouterRig(fakes, known, others, config, make_path)
    await rig.router.start()
    try:
        await scenario(rig)
        for client in rig.clients:
            client.leave()
        await until(rig.at_rest)
    finally:
        await rig.router.stop()
        for fake in fakes:
            await fake.stop()
        logging.getLogger("warmroute").removeHandler(handler)
    assert not errors, errors


def _is_grpc_word_for_a_closed_loop(context: dict[str, Any]) -> bool:
    """gRPC has one queue of completions for all loops of a process, read by the one that runs.

    A stream's last one (that the peer has closed it) is awaited by nobody, and may come when the loop of the
    test that made it is closed. It says nothing of the loop that reads it, which is open, and loses nothing.
    """
    error = context.get("exception")
    return (
        isinstance(error, RuntimeError)
        and str(error) == "Event loop is closed"
        and "PollerCompletionQueue._handle_events" in context["message"]
    )


def sse_events(body: bytes) -> list[Any]:
    """The data of a stream's events, parsed; what is no JSON as text."""
    events = []
    for block in body.decode().replace("\r\n", "\n").split("\n\n"):
        data = "\n".join(line[5:].strip() for line in block.split("\n") if line.startswith("data:"))
        if data:
            with suppress(ValueError):
                data = json.loads(data)
            events.append(data)
    return events
