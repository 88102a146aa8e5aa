"""One replica's own pages, read as its engine writes them: models, load, the size of its cache."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import fields, replace
from typing import Any

import orjson

from replica.contract.load_report import LoadReport
from router.engines import ENGINES
from router.engines.engine import Engine
from router.engines.metrics_page import MetricsPage
from router.engines.recognition import recognized, recognized_by_info

Read = Callable[[str], Awaitable[bytes | None]]
"""A path's body, ``None`` if there is none to be had."""


class EngineReader:
    """Of one replica."""

    def __init__(self, kind: str, read: Read) -> None:
        """``kind``: as configured."""
        self.kind = kind
        self._read = read
        self._models: list[Mapping[str, Any]] = []
        self._info: LoadReport | None = None
        self.engine: Engine | None = None
        """``None``: not known (yet)."""

    async def models(self) -> frozenset[str]:
        """The names of the models it serves; empty if it does not tell."""
        listed = (await self._object("/v1/models")).get("data")
        found: list[Mapping[str, Any]] = []
        if isinstance(listed, list):
            found += (one for one in listed if isinstance(one, dict))
        self._models = found or self._models
        return frozenset(one["id"] for one in found if isinstance(one.get("id"), str))

    async def load(self, *, again: bool) -> LoadReport | None:
        """What it tells of its load; ``None``: nothing. ``again``: another engine may run there now."""
        body = await self._read("/metrics")
        page = MetricsPage("" if body is None else body.decode("utf-8", "replace"))
        if again:
            await self._find_out(page)
        engine = self.engine
        if engine is None:
            return None if body is None else LoadReport()
        told = replace(engine.load(page), engine=engine.kind)
        return told if self._info is None else _filled_up(told, self._info)

    async def _find_out(self, page: MetricsPage) -> None:
        """Which engine it is, and what that tells beside its metrics."""
        info: Mapping[str, Any] = {}
        engine = ENGINES.get(self.kind) or recognized(self._models, page)
        if engine is None:
            for one in ENGINES.values():
                if one.info_marks is not None:
                    info = await self._ask_info(one)
                    if recognized_by_info(one, info):
                        engine = one
                        break
        elif engine.info_paths:
            info = await self._ask_info(engine)
        if engine is not None:  # one that answers nothing now is what it was
            self.engine = engine
            self._info = engine.info(info) if info else self._info

    async def _ask_info(self, engine: Engine) -> Mapping[str, Any]:
        for path in engine.info_paths:
            info = await self._object(path)
            if info:
                return info
        return {}

    async def _object(self, path: str) -> dict[str, Any]:
        body = await self._read(path)
        if body is None:
            return {}
        try:
            found = orjson.loads(body)
        except orjson.JSONDecodeError:
            return {}
        return found if isinstance(found, dict) else {}


def _filled_up(told: LoadReport, info: LoadReport) -> LoadReport:
    """``told``, with what it leaves open from ``info``."""
    names = [field.name for field in fields(LoadReport)]
    more = {name: getattr(info, name) for name in names if getattr(told, name) is None}
    return replace(told, **more)
