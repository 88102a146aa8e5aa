"""A real replica on a real socket for the tests, and small clients of it."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import torch

from replica.batch import Batch, Work
from replica.config import ReplicaConfig
from replica.engine import Engine
from replica.engine_limits import EngineLimits
from replica.model.load import LoadedModel
from replica.server.app import Running, start

WAIT_S = 30.0
USER = [{"role": "user", "content": "Hello there"}]


@asynccontextmanager
async def replica(
    make_engine: Callable[[LoadedModel, EngineLimits, int], Engine] = Engine, **settings: Any
) -> AsyncIterator[Running]:
    """A replica of the tiny model on a free port, stopped at the end."""
    config = ReplicaConfig.model_validate(
        {"model": "tiny", "listen": "127.0.0.1:0", "threads": 1, "drain_s": 0, "kv_tokens": 4096} | settings
    )
    running = await start(config, make_engine=make_engine)
    try:
        yield running
    finally:
        await running.stop()


async def post(url: str, body: Any, **headers: str) -> tuple[int, dict[str, Any]]:
    """POST ``body`` (bytes as they are, anything else as JSON); status and JSON answer."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with aiohttp.ClientSession() as session, session.post(url, data=data, headers=headers) as answer:
        return answer.status, await answer.json()


async def get(url: str) -> tuple[int, str]:
    """GET; status and text."""
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        return answer.status, await answer.text()


async def stream(url: str, body: dict[str, Any]) -> list[Any]:
    """POST with ``stream: true``; the events, parsed, and the final ``[DONE]`` as text."""
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={**body, "stream": True}) as answer,
    ):
        assert answer.status == 200, await answer.text()
        assert answer.headers["content-type"].startswith("text/event-stream")
        raw = await answer.read()
    events = []
    for block in raw.decode().removesuffix("\n\n").split("\n\n"):
        assert block.startswith("data: ") and "\n" not in block
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def gauge(url: str, name: str) -> float:
    """One sample on /metrics."""
    _, page = await get(url + "/metrics")
    lines = [line for line in page.splitlines() if line.startswith(name + "{")]
    assert len(lines) == 1, lines
    return float(lines[0].rsplit(" ", 1)[1])


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition; TimeoutError after WAIT_S."""
    async with asyncio.timeout(WAIT_S):
        while not await condition():  # noqa: ASYNC110 - what it waits for is behind a socket
            await asyncio.sleep(0.005)


class FaultyRunner:
    """A runner that fails for batches with a row that ``breaks`` says; with SystemExit if ``fatal``."""

    def __init__(self, runner: Any, breaks: Callable[[Work], bool], *, fatal: bool = False) -> None:
        self._runner = runner
        self._breaks = breaks
        self._fatal = fatal

    def run(self, batch: Batch) -> tuple[tuple[Work, ...], torch.Tensor]:
        """As the real one, or not."""
        if any(self._breaks(row) for row in batch.rows):
            if self._fatal:
                raise SystemExit("injected death")
            raise RuntimeError("injected failure")
        result: tuple[tuple[Work, ...], torch.Tensor] = self._runner.run(batch)
        return result


def faulty_engine(
    breaks: Callable[[Work], bool], *, fatal: bool = False
) -> Callable[[LoadedModel, EngineLimits, int], Engine]:
    """Makes engines with a :class:`FaultyRunner`."""

    def make(model: LoadedModel, limits: EngineLimits, seed: int) -> Engine:
        engine = Engine(model, limits, seed)
        engine._runner = FaultyRunner(engine._runner, breaks, fatal=fatal)  # type: ignore[assignment]
        return engine

    return make


class ForcingRunner:
    """A runner after whose rows ``forced`` follows, token by token, whatever the model says."""

    def __init__(self, runner: Any, forced: Sequence[int]) -> None:
        self._runner = runner
        self._forced = forced

    def run(self, batch: Batch) -> tuple[tuple[Work, ...], torch.Tensor]:
        """Rows that sample, with logits of the next forced token."""
        works, logits = self._runner.run(batch)
        forced = torch.full_like(logits, -50.0)
        for row, work in enumerate(works):
            forced[row, self._forced[work.sequence.output_tokens % len(self._forced)]] = 50.0
        return works, forced


def forcing_engine(forced: Sequence[int]) -> Callable[[LoadedModel, EngineLimits, int], Engine]:
    """Makes engines with a :class:`ForcingRunner`."""

    def make(model: LoadedModel, limits: EngineLimits, seed: int) -> Engine:
        engine = Engine(model, limits, seed)
        engine._runner = ForcingRunner(engine._runner, forced)  # type: ignore[assignment]
        return engine

    return make
