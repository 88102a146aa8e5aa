"""Asks every replica, at an interval, whether it is well, what it serves and how loaded it is.

Probes run side by side on connections of their own, so one dead host delays nobody and busy traffic
starves no probe. A probe costs no tokens: ``GET /health``, then ``/v1/models``, ``/metrics`` and where the
engine tells more (``router.engines``).
"""

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial

import aiohttp

from replica.contract.load_report import LoadReport
from router.config import RouterConfig
from router.ended_tasks import end_tasks
from router.engines.engine import Engine
from router.proxy.cache_report import CacheWarnings
from router.proxy.engine_reader import EngineReader
from router.proxy.path_rules import PathRules
from router.proxy.replica_access import ReplicaAccess, replica_accesses
from router.proxy.sockets import is_own
from router.routing.fleet import Fleet
from router.routing.health import HealthState
from router.routing.replica_state import UNNAMED, ReplicaState

log = logging.getLogger("warmroute.prober")

REPORT_BYTES = 4 * 1024 * 1024
"""A longer page is not read on."""
MODELS = "/v1/models"
MODELS_EVERY = 15
UNKNOWN_AGAIN_S = 0.5
"""So soon a replica is asked again that did not answer its first probe in time."""


class Prober:
    """One task per replica; each change of state is one log line."""

    def __init__(
        self, fleet: Fleet, config: RouterConfig, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._fleet = fleet
        self._config = config
        self._clock = clock
        self._accesses: dict[ReplicaState, ReplicaAccess] = {}
        self._cache_warnings = CacheWarnings(fleet)
        self._refuse_salts: set[ReplicaState] = set()
        """Of which that was logged."""
        self._sharing_told: dict[ReplicaState, str | None] = {}
        """The last that was logged of a cache which tenants would share."""
        self._spoke: set[ReplicaState] = set()
        """Which have answered at ``/v1/models`` since last found ill, if only by a 404."""
        self._no_models: set[ReplicaState] = set()
        """The same: which have told no models."""
        self._tasks: dict[ReplicaState, asyncio.Task[None]] = {}
        self._ended: set[asyncio.Task[None]] = set()
        self._doubted: dict[ReplicaState, asyncio.Event] = {}
        """Set when the replica is to be probed at once."""

    async def start(self) -> None:
        """Begin probing; returns when each replica was asked once (at most the probe's time limit)."""
        accesses = replica_accesses(self._config)
        first_round = [self.watch(replica, accesses[replica.name]) for replica in self._fleet.replicas]
        if first_round:
            await asyncio.wait(first_round, timeout=self._config.health.timeout_s + 1.0)

    def watch(self, replica: ReplicaState, access: ReplicaAccess) -> "asyncio.Future[None]":
        """Probe ``replica``, too, from now on; the future is done when it was asked once."""
        asked: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._accesses[replica] = access
        self._doubted[replica] = asyncio.Event()
        self._tasks[replica] = asyncio.create_task(self._watch(replica, asked), name=f"probe {replica.name}")
        return asked

    def unwatch(self, replica: ReplicaState) -> None:
        """Nothing is told of ``replica`` any more, if anything was."""
        if replica not in self._tasks:
            return
        self._cache_warnings.forget(replica)
        self._refuse_salts.discard(replica)
        self._no_models.discard(replica)
        self._sharing_told.pop(replica, None)
        self._spoke.discard(replica)
        task = self._tasks.pop(replica)
        del self._accesses[replica], self._doubted[replica]
        task.cancel()
        self._ended.add(task)
        task.add_done_callback(self._ended.discard)

    def apply(self, config: RouterConfig, accesses: Mapping[str, ReplicaAccess]) -> None:
        """Probe by ``config`` from the next round on; ``accesses`` by replica name."""
        self._config = config
        for replica in self._accesses:
            if not replica.leaving:
                self._accesses[replica] = accesses[replica.name]

    def probe_now(self, name: str) -> None:
        """Somebody doubts that the replica of that name is well."""
        for replica, doubted in self._doubted.items():
            if replica.name == name and not replica.leaving:
                doubted.set()

    async def stop(self) -> None:
        """End all probes."""
        await end_tasks([*self._tasks.values(), *self._ended])

    async def _watch(self, replica: ReplicaState, asked: "asyncio.Future[None]") -> None:
        async with aiohttp.ClientSession() as session:
            await self._ask_for_ever(session, replica, asked)

    async def _ask_for_ever(
        self, session: aiohttp.ClientSession, replica: ReplicaState, asked: "asyncio.Future[None]"
    ) -> None:
        reader = EngineReader(self._accesses[replica].kind, partial(self._read, session, replica))
        rounds = 0
        logged: HealthState | None = None
        doubted = self._doubted[replica]
        while replica in self._accesses:
            failure = await self._probe(session, replica)
            well = failure is None
            again = rounds % MODELS_EVERY == 0 or replica.engine is None
            if well and (again or not replica.models):
                await self._ask_models(reader, replica)
            if well:
                await self._ask_load(reader, replica, again=again)
            rounds = rounds + 1 if well else 0  # another server may answer next
            if not well:
                self._spoke.discard(replica)
            self._cache_warnings.look(replica)
            after = replica.health.state
            if not asked.done():
                asked.set_result(None)
            if after is not logged:  # by this probe, or by requests since the last one
                logged = after
                if after is HealthState.EJECTED and replica.health.silent_at is not None:
                    pass  # whoever found it silent logged that
                elif after is HealthState.EJECTED:
                    log.warning("replica %s is ejected: %s", replica.name, failure or "its requests failed")
                elif after is HealthState.UNKNOWN:
                    log.warning("replica %s could not be probed yet: %s", replica.name, failure)
                else:
                    log.info("replica %s is %s", replica.name, after.value)
            pause_s = self._config.health.interval_s
            if after is HealthState.UNKNOWN and replica.probed:
                pause_s = min(pause_s, UNKNOWN_AGAIN_S)
            with suppress(TimeoutError):
                async with asyncio.timeout(pause_s):
                    await doubted.wait()
            doubted.clear()

    def _check_watched(self, replica: ReplicaState) -> None:
        """Raise ``CancelledError`` if the replica was let go of meanwhile: a request can swallow that."""
        if replica not in self._accesses:
            raise asyncio.CancelledError

    def _get(
        self, session: aiohttp.ClientSession, replica: ReplicaState, path: str
    ) -> AbstractAsyncContextManager[aiohttp.ClientResponse]:
        """As requests are sent there; redirects are not followed: its key is for the replica alone."""
        self._check_watched(replica)
        access = self._accesses[replica]
        return session.get(
            access.url + path,
            headers=access.headers,
            ssl=access.tls or True,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(total=self._config.health.timeout_s),
        )

    async def _probe(self, session: aiohttp.ClientSession, replica: ReplicaState) -> str | None:
        """GET the health path; what failed, for the log, or None.

        Whatever goes wrong is the replica's failure, never the prober's end.
        """
        asked_at = self._clock()
        asked = f"GET {self._accesses[replica].url}{self._config.health.path}"
        failure, refused, late = "", False, False
        try:
            async with self._get(session, replica, self._config.health.path) as answer:
                await _body(answer)
                # 404 and 405: alive, but an OpenAI server without that path.
                if not (200 <= answer.status < 300 or answer.status in (404, 405)):
                    failure = f"status {answer.status}"
        except aiohttp.ClientConnectorError as error:
            if is_own(error.os_error):
                return "the router has no socket left to ask with"  # which says nothing of the replica
            refused, failure = True, f"no connection ({error.os_error.strerror or type(error).__name__})"
        except TimeoutError:
            late, failure = True, "no answer within health.timeout_s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            failure = type(error).__name__
        self._check_watched(replica)
        if not failure:
            self._fleet.probe_succeeded(replica.index, self._clock())
            return None
        self._fleet.probe_failed(
            replica.index, self._clock(), refused=refused, asked_at=asked_at if late else None
        )
        return f"{asked}: {failure}"

    async def _ask_models(self, reader: EngineReader, replica: ReplicaState) -> None:
        models = await reader.models()
        self._check_watched(replica)
        if models and not replica.spec.model:
            self._fleet.models_reported(replica.index, models)
        self._warn_of_models(replica)

    async def _ask_load(self, reader: EngineReader, replica: ReplicaState, *, again: bool) -> None:
        before = reader.engine
        report = await reader.load(again=again)
        self._check_watched(replica)
        if report is not None:
            self._fleet.load_reported(replica.index, report, self._clock())
            self._warn_of_salts(replica, report)
        engine = reader.engine
        if again and (engine is not None or replica in self._spoke):
            self._fleet.engine_found(replica.index, UNNAMED if engine is None else engine.kind)
        if engine is not None and engine is not before:
            log.info("replica %s runs %s", replica.name, engine.title)
            listened = {one.effective_name for one in self._config.replicas if one.kv_events is not None}
            if not engine.publishes_kv_events and replica.name in listened:
                log.warning("replica %s: kv_events: %s publishes none", replica.name, engine.title)
        if again:
            self._warn_of_sharing(replica, engine)

    def _warn_of_sharing(self, replica: ReplicaState, engine: Engine | None) -> None:
        """Once, where tenants' prompts are not kept apart: everywhere, or at an engine's open paths."""
        told = None if engine is None else _sharing(engine, self._config)
        if told != self._sharing_told.get(replica):
            self._sharing_told[replica] = told
            if told is not None:
                log.warning("replica %s: %s", replica.name, told)

    def _warn_of_models(self, replica: ReplicaState) -> None:
        """Once, where something answers that has never said which models it serves: the wrong port, maybe."""
        if replica.models is not None:
            if replica in self._no_models:
                self._no_models.discard(replica)
                log.info("replica %s lists its models now", replica.name)
        elif replica not in self._no_models:
            self._no_models.add(replica)
            log.warning(
                "replica %s answers, but GET %s/v1/models gave no model list: it is sent requests for any "
                "model, and is perhaps no OpenAI server; check url, or give model: NAME",
                replica.name,
                self._accesses[replica].url,
            )

    def _warn_of_salts(self, replica: ReplicaState, report: LoadReport) -> None:
        """Once, where a replica will answer every tenant's request with 400."""
        tenants = self._config.tenants
        unsigned = tenants is not None and tenants.salt_signing_key is None and report.cache_salts == "signed"
        if tenants is None or (report.cache_salts != "none" and not unsigned):
            self._refuse_salts.discard(replica)
        elif replica not in self._refuse_salts:
            self._refuse_salts.add(replica)
            log.warning(
                "replica %s takes %s, but tenants' requests carry one: it answers them with 400; set "
                "cache_salt: {accept: signed, key: KEY} in its config and tenants.salt_signing_key: KEY here",
                replica.name,
                "only a cache_salt that is signed" if unsigned else "no cache_salt",
            )

    async def _read(self, session: aiohttp.ClientSession, replica: ReplicaState, path: str) -> bytes | None:
        try:
            async with self._get(session, replica, path) as answer:
                if path == MODELS and answer.status < 500:
                    self._spoke.add(replica)
                if answer.status != 200:
                    return None
                return await _body(answer)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError):
            return None


def _sharing(engine: Engine, config: RouterConfig) -> str | None:
    """What is to be said of where tenants would share ``engine``'s prefix cache, if anything is."""
    if config.tenants is None:
        return None
    rules = PathRules(config.allowed_paths, config.refused_paths)
    shared = [path for path in engine.unparted_paths if not rules.refuse(b"POST", path.encode())]
    if engine.parts_cache and not shared:
        return None
    where = f"reads no cache_salt at {', '.join(shared)}" if engine.parts_cache else "knows no cache_salt"
    if config.tenants.isolation == "strict":
        then = "there it gets no tenants' requests; they go to other replicas, or get 403 (tenants.isolation)"
    else:
        then = "there tenants share its cache (tenants.isolation: warn); refused_paths closes paths"
    return f"{engine.title} {where}: {then}"


async def _body(answer: aiohttp.ClientResponse) -> bytes | None:
    """All of it, in however many pieces it comes; ``None``: it is longer than a page that tells something."""
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > REPORT_BYTES:
            return None
    return bytes(body)
