"""The admin port: metrics, dashboard, fleet, explain, drain, replicas, reload. Loopback by default."""

import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from hashlib import sha256
from typing import Any

import orjson
from aiohttp import web

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.discovery.discovery import SourceReport
from router.proxy.added_replicas import AddedReplicas
from router.proxy.admin_guard import foreign_page
from router.proxy.cache_report import cache_state
from router.proxy.counters import Counters
from router.proxy.dashboard import PATH as DASHBOARD
from router.proxy.dashboard import add_dashboard
from router.proxy.explanation import cost_fit, explanation, no_prompt
from router.proxy.exposition import metrics_page
from router.proxy.isolation import Apart, Isolation
from router.proxy.key_ring import admin_keys
from router.proxy.prefill_request import splittable
from router.proxy.prompt_reader import PromptReader
from router.proxy.recent_report import RecentReport
from router.proxy.router_error import CACHE_SHARED, RouterError
from router.proxy.state_report import state_fields
from router.proxy.tenancy import Tenancy
from router.proxy.tenant_report import tenant_states
from router.proxy.tenant_request import take_in
from router.proxy.traffic_report import replica_traffic, traffic_state
from router.routing.decision import NoReplica
from router.routing.fleet import Fleet
from router.routing.prompt_blocks import Prompt, read_prompt
from router.routing.replica_state import ReplicaState
from router.state.shared_state import StateReport
from router.tenants_config import PUBLIC

log = logging.getLogger("warmroute")

BODY_BYTES = 64 * 1024 * 1024
TENANT_HEADER = "x-warmroute-tenant"
"""Whose request ``/explain`` is to explain."""
EXPLAINED_PATH = b"/v1/chat/completions"
"""Where that request is taken to have been sent."""


class Admin:
    """The aiohttp application of the admin port."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        counters: Counters,
        reload: Callable[[], Awaitable[RouterConfig]],
        state: Callable[[], StateReport],
        added: AddedReplicas,
        sources: Callable[[], list[SourceReport]],
        recent: RecentReport,
        tenancy: Callable[[], Tenancy | None],
        *,
        prompt_reader: PromptReader | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prompt_reader = prompt_reader
        self._fleet = fleet
        self.apply(config)
        self._counters = counters
        self._reload = reload
        self._state = state
        self._added = added
        self._sources = sources
        self._recent = recent
        self._tenancy = tenancy
        self._clock = clock
        self._runner: web.AppRunner | None = None
        self.address = ""

    def apply(self, config: RouterConfig) -> None:
        """``config`` is the one in force."""
        self.config = config
        self._hash = sha256(config.model_dump_json().encode()).hexdigest()[:12]
        self._keys = admin_keys(config.keys)

    async def start(self) -> None:
        """Listen on ``config.admin``; ``address`` tells where."""
        app = web.Application(client_max_size=BODY_BYTES, middlewares=[_errors_as_json, self._guarded])
        add_dashboard(app)
        app.router.add_get("/", _to_dashboard)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_get("/fleet", self._fleet_state)
        app.router.add_get("/config", self._effective_config)
        app.router.add_get("/health", self._health)
        app.router.add_post("/explain", self._explain)
        app.router.add_post("/drain/{replica}", self._drain)
        app.router.add_delete("/drain/{replica}", self._undrain)
        app.router.add_post("/reload", self._reloaded)
        self._added.add_routes(app.router)
        self._recent.add_routes(app.router)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        listen = self.config.admin
        site: web.BaseSite
        if listen.startswith("unix:"):
            site = web.UnixSite(self._runner, listen.removeprefix("unix:"))
            await site.start()
            self.address = listen
        else:
            host, _, port = listen.rpartition(":")
            site = web.TCPSite(self._runner, host.strip("[]"), int(port))
            await site.start()
            bound = self._runner.addresses[0]
            self.address = f"{host}:{bound[1]}"

    async def stop(self) -> None:
        """Close the port."""
        if self._runner is not None:
            await self._runner.cleanup()

    @web.middleware
    async def _guarded(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """With a key, or without keys from no foreign page. What holds no data is for everybody."""
        if request.path in ("/", "/health", DASHBOARD):
            return await handler(request)
        if not self._keys:
            why = foreign_page(request.headers, self.config.admin_hosts, self.config.admin)
            if why is not None:
                raise web.HTTPForbidden(text=why)
        else:
            given = request.headers.getall("authorization", [])
            refusal = self._keys.refusal(", ".join(given).encode() if given else None)
            if refusal is not None:
                answer = web.Response(body=refusal.body(""), status=refusal.status)
                answer.content_type = "application/json"
                if refusal.status == 401:
                    answer.headers["www-authenticate"] = "Bearer"
                return answer
        return await handler(request)

    async def _health(self, request: web.Request) -> web.Response:
        return _json({"status": "ok"})

    async def _metrics(self, request: web.Request) -> web.Response:
        return web.Response(
            body=metrics_page(self._fleet, self._counters, self._state(), self._sources()),
            headers={"content-type": "text/plain; version=0.0.4; charset=utf-8"},
        )

    async def _fleet_state(self, request: web.Request) -> web.Response:
        state = fleet_state(self._fleet, self._counters, self._clock())
        config = {"version": 1 + self._counters.reloads, "hash": self._hash}
        rest = {"state": state_fields(self._state()), "discovery": [asdict(one) for one in self._sources()]}
        return _json({"config": config} | state | rest)

    async def _effective_config(self, request: web.Request) -> web.Response:
        return _json(self.config.model_dump(mode="json"))  # secrets are masked by their type

    async def _explain(self, request: web.Request) -> web.Response:
        body = await request.read()
        prompt = self._prompt(body, request.headers.get(TENANT_HEADER))
        if not prompt.units:
            raise web.HTTPBadRequest(text=no_prompt(body))
        session, policy = (request.headers.get(name) for name in ("x-session-id", "x-warmroute-policy"))
        tenancy, within = self._tenancy(), None
        if tenancy is not None and tenancy.isolates:
            within = Isolation(self._fleet.replicas).within(EXPLAINED_PATH, None)
        try:
            decision, rows, asked = self._fleet.explain(
                prompt,
                self._clock(),
                session=session,
                policy=policy,
                within=within,
                two_steps=splittable(body),
            )
        except NoReplica as error:
            if error.why == "unknown_model":
                raise web.HTTPNotFound(text=str(error)) from None
            if isinstance(within, Apart) and within.sharing_serve(prompt.model):
                raise web.HTTPForbidden(text=CACHE_SHARED.message) from None
            raise web.HTTPServiceUnavailable(text=str(error)) from None
        return _json(explanation(self._fleet, decision, rows, asked))

    def _prompt(self, body: bytes, tenant: str | None) -> Prompt:
        """The prompt in ``body`` as that tenant's, or as one of a public key where tenants are told apart."""
        tenancy = self._tenancy()
        caller = None if tenancy is None else tenancy.named(tenant or PUBLIC)
        if tenant and caller is None:
            known = "none are configured" if tenancy is None else f"there are: {', '.join(tenancy.names)}"
            raise web.HTTPBadRequest(text=f"{TENANT_HEADER}: no tenant is named {tenant!r}; {known}")
        if caller is not None:
            taken = take_in(caller, None, body)
            if isinstance(taken, RouterError):
                raise web.HTTPBadRequest(text=f"{taken.message} (tenant {caller.tenant.name})")
            body = taken.body
        prompt = read_prompt(body) if self._prompt_reader is None else self._prompt_reader.read_now(body)
        return prompt if caller is None or not prompt.units else caller.owned(prompt)

    async def _drain(self, request: web.Request) -> web.Response:
        return self._set_draining(request, on=True)

    async def _undrain(self, request: web.Request) -> web.Response:
        return self._set_draining(request, on=False)

    def _set_draining(self, request: web.Request, *, on: bool) -> web.Response:
        name = request.match_info["replica"]
        for replica in self._fleet.replicas.staying:
            if replica.name == name:
                self._fleet.drained(replica.index, self._clock(), on=on)
                log.info("replica %s %s by an operator", name, "is drained" if on else "takes work again")
                return _json({"replica": name, "draining": on, "in_flight": replica.in_flight})
        names = ", ".join(replica.name for replica in self._fleet.replicas.staying)
        raise web.HTTPNotFound(text=f"no replica is named {name!r}; there are: {names}")

    async def _reloaded(self, request: web.Request) -> web.Response:
        try:
            config = await self._reload()
        except ConfigError as error:
            raise web.HTTPBadRequest(text=str(error)) from None
        return _json({"reloaded": True, "replicas": [r.effective_name for r in config.replicas]})


async def _to_dashboard(request: web.Request) -> web.Response:
    return web.Response(status=302, headers={"location": DASHBOARD})


@web.middleware
async def _errors_as_json(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    try:
        return await handler(request)
    except web.HTTPException as error:
        message = error.text or error.reason
        headers = {"content-type": "application/json"}
        if isinstance(error, web.HTTPMethodNotAllowed):
            headers["allow"] = ", ".join(sorted(error.allowed_methods))
            message = f"{request.path} of the admin port allows {headers['allow']}"
        elif request.match_info.http_exception is error:  # no route has the path
            message = f"the admin port has no {request.path}; it has {', '.join(_paths(request.app))}"
            if request.path.startswith("/v1/"):
                message += ". Requests to /v1/ go to the public port (listen, 8080 by default)"
        body = {"error": {"message": message, "type": "admin_error", "code": error.status}}
        return web.Response(body=orjson.dumps(body), status=error.status, headers=headers)


def _paths(app: web.Application) -> list[str]:
    """Those that there are, each once, with the method where that is not GET."""
    found: dict[str, None] = {}
    for route in app.router.routes():
        if route.resource is not None and route.method in ("GET", "POST"):
            path = route.resource.canonical
            found[path if route.method == "GET" else f"POST {path}"] = None
    return sorted(found, key=lambda one: one.removeprefix("POST "))


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), headers={"content-type": "application/json"})


def fleet_state(fleet: Fleet, counters: Counters, now: float) -> dict[str, Any]:
    """Every replica's health, ledger, index, calibration and traffic, and the fleet-wide figures."""
    return {
        "replicas": [
            _replica_state(fleet, replica, now)
            | {
                "cache": cache_state(fleet, counters, replica),
                "traffic": replica_traffic(counters, replica.name),
            }
            for replica in fleet.replicas
        ],
        "traffic": traffic_state(counters),
        "tenants": tenant_states(fleet, counters),
        "tokens_per_unit": fleet.token_ratio.tokens_per_unit,
        "arrivals_per_s": fleet.traffic.arrivals_per_s(now),
        "decode_price": fleet.traffic.decode_price,
        "held": fleet.held,
        "spills": fleet.spills,
        "saved_prefill_s": fleet.saved_s,
        "index_nodes": fleet.index.nodes(),
    }


def _replica_state(fleet: Fleet, replica: ReplicaState, now: float) -> dict[str, Any]:
    report = replica.last_report
    ratio = fleet.token_ratio.tokens_per_unit
    return {
        "name": replica.name,
        "url": replica.spec.url,
        "engine": None if report is None else report.engine,
        "weight": replica.weight,
        "role": replica.role.value,
        "kv_pull": replica.spec.kv_pull.value,
        "kv_source": replica.spec.kv_source,
        "transfer_8192_tokens_ms": round(1e3 * replica.transfer.seconds(8_192, now), 3),
        "tags": replica.spec.tags,
        "models": sorted(replica.models) if replica.models else None,
        "health": replica.health.state.value,
        "silent": replica.health.silent_at is not None,
        "resting": replica.resting,
        "draining": replica.draining,
        "leaving": replica.leaving,
        "usable": replica.usable,
        "requests": replica.requests,
        "held": replica.held.own,
        "queued": replica.ledger.queued,
        "decoding": replica.ledger.decoding,
        "wait_ms": replica.ledger.backlog_s(now) * 1_000.0,
        "outstanding_tokens": replica.ledger.outstanding_tokens,
        "utilization": replica.ledger.utilization(now),
        "index": {
            "tokens": int(fleet.index.held(replica.index) * ratio),
            "capacity_tokens": int(fleet.index.capacity(replica.index) * ratio),
        },
        "calibration": {
            "prefill_factor": replica.cost.prefill_factor,
            "prefills_seen": replica.cost.prefills_seen,
            "decode_factor": replica.cost.decode_factor,
            "prefill_1000_tokens_ms": replica.cost.prefill_s(1_000, 0) * 1_000.0,
            "step_ms": replica.cost.step_s(1) * 1_000.0,
            "prior": replica.prior_source,
            **cost_fit(replica.cost),
        },
        "reported": None
        if report is None
        else {
            "running": report.running,
            "waiting": report.waiting,
            "kv_usage": report.kv_usage,
            "capacity_tokens": report.capacity_tokens,
            "prefix_queried_tokens": report.prefix_queried_tokens,
            "prefix_hit_tokens": report.prefix_hit_tokens,
        },
    }
