"""A data plane in front of fake replicas, all in one loop; at the end every counter must be zero."""

import asyncio
import logging
import random
import ssl
import traceback
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import uvloop

from router.config import RouterConfig, parse_config
from router.proxy.counters import Counters
from router.proxy.data_plane import DataPlane
from router.proxy.fleet_config import fleet_settings, replica_spec
from router.routing.fleet import Fleet
from router.routing.policies import POLICIES
from router.routing.replica_state import UNNAMED
from tests.fakes.fake_replica import FakeReplica
from tests.fakes.raw_client import RawAnswer, RawClient

LIMIT_S = 10.0
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
CHAT_STREAM = {**CHAT, "stream": True}


class Asking:
    """Whoever has an address that clients connect to."""

    async def client(self) -> RawClient:
        """A new connection."""
        raise NotImplementedError

    async def ask(
        self, body: bytes | dict[str, Any] = CHAT, path: str = "/v1/chat/completions", **fields: Any
    ) -> RawAnswer:
        """One request on a connection of its own."""
        client = await self.client()
        await client.post(body, path, **fields)
        answer = await client.answer(to_head=fields.get("method") == "HEAD")
        client.leave()
        return answer


class Rig(Asking):
    """What a scenario works with."""

    def __init__(self, replicas: list[FakeReplica], config: RouterConfig) -> None:
        self.replicas = replicas
        self.config = config
        self.counters = Counters()
        rng = random.Random(config.seed)
        specs = [replica_spec(replica, config) for replica in config.replicas]
        self.fleet = Fleet(specs, POLICIES[config.policy.kind](rng), fleet_settings(config))
        for index, spec in enumerate(specs):
            self.fleet.probe_succeeded(index, 0.0)
            self.fleet.engine_found(index, spec.engine or UNNAMED)
        self.plane = DataPlane(self.fleet, config, self.counters)
        self.clients: list[RawClient] = []

    @property
    def replica(self) -> FakeReplica:
        """The first."""
        return self.replicas[0]

    async def client(self, *, read_ahead: int = 1 << 26) -> RawClient:
        """A new connection to the router."""
        client = await RawClient.connect(self.plane.address, read_ahead=read_ahead)
        self.clients.append(client)
        return client

    def drain(self, index: int, *, on: bool = True) -> None:
        """The operator drains a replica."""
        self.fleet.drained(index, self.plane.service.clock(), on=on)

    def booked(self) -> dict[str, float]:
        """Everything that must be zero when nothing is in flight."""
        ledgers = [replica.ledger for replica in self.fleet.replicas]
        quotas = self.fleet.tenants.quotas.values()
        return {
            "in_flight": self.counters.in_flight,
            "held": self.fleet.held,
            "queued": sum(ledger.queued for ledger in ledgers),
            "decoding": sum(ledger.decoding for ledger in ledgers),
            "outstanding_tokens": sum(ledger.outstanding_tokens for ledger in ledgers),
            "tenants_in_flight": sum(quota.in_flight for quota in quotas),
            "tenants_held": sum(quota.held for quota in quotas),
            "tenants_arriving": sum(quota.arriving + quota.arriving_bytes for quota in quotas),
            "receiving": self.counters.receiving_bytes,
        }


async def until(condition: Callable[[], bool], limit_s: float = LIMIT_S) -> None:
    """Poll ``condition`` until it holds; fails after ``limit_s``."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + limit_s
    while not condition():
        assert loop.time() < deadline, "the condition did not come true"
        await asyncio.sleep(0.002)


def with_rig(
    scenario: Callable[[Rig], Awaitable[None]],
    *,
    replicas: int = 1,
    stop_s: float = 2.0,
    listen: str = "127.0.0.1:0",
    model: str | None = None,
    tls: ssl.SSLContext | None = None,
    public_tls: ssl.SSLContext | None = None,
    each: Sequence[dict[str, Any]] = (),
    **config: Any,
) -> Rig:
    """Run ``scenario`` against a fresh router; then everything must be released.

    ``each``: more keys of each replica, instead of ``replicas``.
    """
    config.setdefault("policy", {"kind": "round_robin"})
    config.setdefault("seed", 1)
    return uvloop.run(_run(scenario, each or [{}] * replicas, stop_s, listen, model, tls, public_tls, config))


async def _run(
    scenario: Callable[[Rig], Awaitable[None]],
    each: Sequence[dict[str, Any]],
    stop_s: float,
    listen: str,
    model: str | None,
    tls: ssl.SSLContext | None,
    public_tls: ssl.SSLContext | None,
    keys: dict[str, Any],
) -> Rig:
    faults: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: faults.append(_described(context)))
    errors = _ErrorLog()
    logging.getLogger("warmroute").addHandler(errors)
    fakes = [FakeReplica(tls=tls) for _ in each]
    for fake in fakes:
        await fake.start()
    urls = [
        {"url": fake.url, "name": f"r{index}", **({"model": model} if model else {}), **more}
        for index, (fake, more) in enumerate(zip(fakes, each, strict=True))
    ]
    rig = Rig(fakes, parse_config({"listen": listen, "replicas": urls, **keys}, "test"))
    await rig.plane.start(public_tls)
    try:
        await scenario(rig)
        for client in rig.clients:
            client.leave()
        await until(lambda: not any(rig.booked().values()))
        await rig.plane.stop(stop_s)
        assert not any(rig.booked().values()), rig.booked()
        assert rig.counters.open_client_connections == 0
        assert rig.counters.open_replica_connections == 0
    finally:
        await rig.plane.stop(0.0)
        for fake in fakes:
            await fake.stop()
        logging.getLogger("warmroute").removeHandler(errors)
    assert not faults, faults
    assert not errors.records, [record.getMessage() for record in errors.records]
    return rig


def _described(context: dict[str, Any]) -> str:
    exception = context.get("exception")
    trace = "".join(traceback.format_exception(exception)) if exception is not None else ""
    return f"{context['message']}\n{trace}"


class _ErrorLog(logging.Handler):
    """Faults that the router caught and logged are failures of the test all the same."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
