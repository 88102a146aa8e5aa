"""Asks every replica, at an interval, whether it is well, what it serves and how loaded it is.

Probes run side by side on connections of their own, so one dead host delays nobody and busy traffic
starves no probe. A probe costs no tokens: ``GET /health``, then ``/v1/models`` and ``/metrics``.
"""

import asyncio
import logging
import time
from collections.abc import Callable

import aiohttp
import orjson

from router.config import RouterConfig
from router.proxy.cache_report import CacheWarnings
from router.proxy.vllm_metrics import parse_load_report
from router.routing.fleet import Fleet
from router.routing.health import HealthState
from router.routing.replica_state import ReplicaState

log = logging.getLogger("warmroute.prober")

REPORT_BYTES = 4 * 1024 * 1024
MODELS_EVERY = 15


class Prober:
    """One task per replica; each change of state is one log line."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._cache_warnings = CacheWarnings(fleet)
        self._session: aiohttp.ClientSession | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._first_round: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        """Begin probing; returns when each replica was asked once (at most the probe's time limit)."""
        timeout = aiohttp.ClientTimeout(total=self._config.health.timeout_s)
        self._session = aiohttp.ClientSession(
            timeout=timeout, connector=aiohttp.TCPConnector(limit=0), headers=self._headers()
        )
        loop = asyncio.get_running_loop()
        for replica in self._fleet.replicas:
            asked: asyncio.Future[None] = loop.create_future()
            self._first_round.append(asked)
            self._tasks.append(asyncio.create_task(self._watch(replica, asked), name=f"probe {replica.name}"))
        await asyncio.wait(self._first_round, timeout=self._config.health.timeout_s + 1.0)

    async def stop(self) -> None:
        """End all probes."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _headers(self) -> dict[str, str]:
        key = self._config.api_key
        return {"authorization": f"Bearer {key.get_secret_value()}"} if key is not None else {}

    async def _watch(self, replica: ReplicaState, asked: "asyncio.Future[None]") -> None:
        interval = self._config.health.interval_s
        rounds = 0
        logged: HealthState | None = None
        while True:
            well = await self._probe(replica)
            if well and (rounds % MODELS_EVERY == 0 or not replica.models):
                await self._ask_models(replica)
            if well:
                await self._ask_load(replica)
                rounds += 1
            self._cache_warnings.look(replica)
            after = replica.health.state
            if not asked.done():
                asked.set_result(None)
            if after is not logged:  # by this probe, or by requests since the last one
                logged = after
                level = logging.WARNING if after is HealthState.EJECTED else logging.INFO
                log.log(level, "replica %s is %s", replica.name, after.value)
            await asyncio.sleep(interval)

    async def _probe(self, replica: ReplicaState) -> bool:
        """GET the health path; whatever goes wrong is the replica's failure, never the prober's end."""
        assert self._session is not None
        asked_at = self._clock()
        try:
            async with self._session.get(replica.spec.url + self._config.health.path) as answer:
                status = answer.status
                await answer.read()
        except aiohttp.ClientConnectorError:
            self._fleet.probe_failed(replica.index, self._clock(), refused=True)
            return False
        except TimeoutError:
            self._fleet.probe_failed(replica.index, self._clock(), asked_at=asked_at)
            return False
        except (aiohttp.ClientError, OSError, ValueError):
            self._fleet.probe_failed(replica.index, self._clock())
            return False
        # 404 and 405: alive, but an OpenAI server without that path.
        if status < 400 or status in (404, 405):
            self._fleet.probe_succeeded(replica.index, self._clock())
            return True
        self._fleet.probe_failed(replica.index, self._clock())
        return False

    async def _ask_models(self, replica: ReplicaState) -> None:
        if replica.spec.model:
            return
        body = await self._read(replica.spec.url + "/v1/models")
        if body is None:
            return
        try:
            entries = orjson.loads(body)["data"]
            models = frozenset(entry["id"] for entry in entries if isinstance(entry["id"], str))
        except (orjson.JSONDecodeError, KeyError, TypeError):
            return
        if models:
            self._fleet.models_reported(replica.index, models)

    async def _ask_load(self, replica: ReplicaState) -> None:
        body = await self._read(replica.spec.url + "/metrics")
        if body is not None:
            report = parse_load_report(body.decode("utf-8", "replace"))
            self._fleet.load_reported(replica.index, report, self._clock())

    async def _read(self, url: str) -> bytes | None:
        assert self._session is not None
        try:
            async with self._session.get(url) as answer:
                if answer.status != 200:
                    return None
                return await answer.content.read(REPORT_BYTES)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None
