"""``GET /decisions`` and ``GET /prefixes`` on the admin port: the last decisions, what their prompts share.

Prefixes are masked: a name tells one from another while this router runs, and nothing of what is in it; no
guess of a prompt can be tested against it.
"""

import asyncio
import os
import time
from collections.abc import Callable
from hashlib import blake2s
from typing import Any

import orjson
from aiohttp import web

from router.proxy.kv_route_report import kv_route
from router.proxy.recent import KEPT, Recent, RecentDecision
from router.proxy.shared_prefixes import SharedPrefix, SharedPrefixes
from router.routing.fleet import Fleet

MOST_PREFIXES = 12
AT_ONCE = 16
"""Prompts counted before the loop's other work has its turn."""


class RecentReport:
    """Made once for each router."""

    def __init__(self, fleet: Fleet, recent: Recent, *, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock``: the one that ``recent`` was written by."""
        self._fleet = fleet
        self._recent = recent
        self._clock = clock
        self._secret = os.urandom(16)

    def add_routes(self, router: web.UrlDispatcher) -> None:
        """The two routes."""
        router.add_get("/decisions", self._decisions)
        router.add_get("/prefixes", self._prefixes)

    async def _decisions(self, request: web.Request) -> web.Response:
        limit = request.query.get("limit", str(KEPT))
        if not limit.isdecimal() or not 1 <= int(limit) <= KEPT:
            raise web.HTTPBadRequest(text=f"limit: expected 1 to {KEPT}, got {limit!r}")
        return _json(self.decisions(self._clock(), int(limit)))

    async def _prefixes(self, request: web.Request) -> web.Response:
        return _json(await self.prefixes())

    def decisions(self, now: float, limit: int) -> dict[str, Any]:
        """The last ``limit``, the latest first. Times are predictions but for ``ttft_ms``."""
        rows = list(self._recent.rows)[-limit:]
        return {"decisions": [_decision(row, self._fleet, now) for row in reversed(rows)]}

    async def prefixes(self) -> dict[str, Any]:
        """What the last prompts have in common."""
        counted = SharedPrefixes()
        rows = [row for row in self._recent.rows if not row.retried]
        for number, row in enumerate(rows):
            counted.add(row.prompt)
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)
        return {
            "requests": len(rows),
            "prefixes": [self._prefix(one) for one in counted.largest(MOST_PREFIXES)],
        }

    def _prefix(self, shared: SharedPrefix) -> dict[str, Any]:
        fleet, prompt = self._fleet, shared.one
        tokens = int(prompt.layout.end(shared.blocks) * fleet.caches.tokens_per_unit(prompt))
        holders = 0
        for mask, held in fleet.caches.levels(prompt):
            if held >= tokens:
                holders |= mask
        name = blake2s(str(shared.key).encode(), key=self._secret, digest_size=4).hexdigest()
        priced = next(iter(fleet.replicas), None)
        return {
            "prefix": name,
            "model": prompt.model,
            "tenant": None if prompt.tenant is None else prompt.tenant.name,
            "requests": shared.prompts,
            "tokens": tokens,
            "replicas": [one.name for one in fleet.replicas if holders >> one.index & 1],
            "prefill_ms": None if priced is None else 1e3 * priced.cost.prefill_s(tokens, 0),
        }


def _decision(row: RecentDecision, fleet: Fleet, now: float) -> dict[str, Any]:
    decision = row.decision
    return {
        "number": row.number,
        "age_s": now - row.at,
        "request_id": row.request_id.decode("ascii", "replace"),
        "model": row.prompt.model,
        "tenant": None if row.prompt.tenant is None else row.prompt.tenant.name,
        "replica": row.replica,
        "reason": decision.reason.value,
        "matched_tokens": decision.matched_tokens,
        "wait_ms": 1e3 * decision.wait_s,
        "prefill_ms": 1e3 * decision.prefill_s,
        "saved_ms": 1e3 * decision.saved_s,
        "spill_saved_ms": None if decision.spill_saved_s is None else 1e3 * decision.spill_saved_s,
        "extra_wait_ms": None if decision.extra_wait_s is None else 1e3 * decision.extra_wait_s,
        "kv": kv_route(fleet, decision),
        "retried": row.retried,
        "status": row.status,
        "ttft_ms": None if row.ttft_s is None else 1e3 * row.ttft_s,
    }


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")
