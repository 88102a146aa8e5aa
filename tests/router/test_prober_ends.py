"""A replica that is let go of is not told of any more, also where a request swallows the cancellation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest

from router.config import parse_config
from router.proxy.fleet_config import make_fleet
from router.proxy.prober import Prober
from router.proxy.replica_access import replica_accesses
from router.routing.health import HealthState

URL = "http://127.0.0.1:9"
PAGES = {"/health": b"", "/v1/models": b'{"data": [{"id": "m"}]}', "/metrics": b""}


class Page:
    """An answer."""

    status = 200

    def __init__(self, body: bytes) -> None:
        self._body = body
        self.content = self

    async def iter_any(self) -> AsyncIterator[bytes]:
        yield self._body


class Swallowing:
    """Sends nothing. One path is never answered: what cancels it becomes what aiohttp makes of it when its
    own time-out, or the answer, comes in the same moment."""

    def __init__(self, path: str, answers: bool) -> None:
        self._path = path
        self._answers = answers
        self.asked = asyncio.Event()
        self.later: list[str] = []
        """Paths that were asked for after that."""

    @asynccontextmanager
    async def get(self, _: aiohttp.ClientSession, url: str, **__: Any) -> AsyncIterator[Page]:
        path = url.removeprefix(URL)
        if self.asked.is_set():
            self.later.append(path)
        elif path == self._path:
            self.asked.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self._answers:
                    raise TimeoutError from None
        yield Page(PAGES[path])


@pytest.mark.parametrize("answers", [False, True])
@pytest.mark.parametrize("path", PAGES)
def test_a_swallowed_cancellation_ends_the_watch(
    path: str, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its index is another replica's by then: nothing may be told of that one."""
    config = parse_config({"replicas": [{"url": URL}], "health": {"interval_s": 1e-3}}, "router.yaml")

    async def scenario() -> None:
        replica_side = Swallowing(path, answers)
        monkeypatch.setattr(aiohttp.ClientSession, "get", lambda *one, **more: replica_side.get(*one, **more))
        fleet = make_fleet(config)
        prober = Prober(fleet, config)
        (before,) = fleet.replicas
        asked = prober.watch(before, replica_accesses(config)[before.name])
        (task,) = (one for one in asyncio.all_tasks() if one.get_name() == f"probe {before.name}")
        await replica_side.asked.wait()
        fleet.replica_removed(before.index, 0.0)
        assert fleet.forget_departed() == [before]
        prober.unwatch(before)
        after = fleet.replica_added(before.spec)
        assert after.index == before.index
        await asyncio.wait([task], timeout=10.0)
        assert task.cancelled() and not replica_side.later and not asked.done()
        assert (after.health.state, after.models, after.last_report) == (HealthState.UNKNOWN, None, None)
        await prober.stop()

    asyncio.run(scenario())
