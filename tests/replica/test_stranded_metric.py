"""Stranded tokens and waiting requests on /metrics, also while a step is under way."""

import asyncio
import threading
from typing import Any

import pytest

from replica.batch import Work
from replica.engine import Engine
from replica.engine_limits import EngineLimits
from replica.model.load import LoadedModel
from replica.server import stranded_tokens
from tests.replica.serving import WAIT_S, gauge, get, post, replica, until
from tests.replica.test_stranding import HeadFirst

STRANDED = "warmroute:kv_stranded_tokens"
PROMPT = [at % 250 for at in range(60)]


def head_first(model: LoadedModel, limits: EngineLimits, seed: int) -> Engine:
    """An engine whose cache frees heads before tails."""
    engine = Engine(model, limits, seed)
    engine._scheduler.cache.__class__ = HeadFirst
    return engine


@pytest.mark.parametrize(("make", "stranded"), [(head_first, 32.0), (Engine, 0.0)])
def test_what_can_never_be_hit_is_on_the_page(make: Any, stranded: float) -> None:
    async def run() -> None:
        async with replica(make, kv_tokens=64, max_model_len=64) as running:
            body = {"model": "tiny", "max_tokens": 1}
            for prompt in (PROMPT, [7] * 16, [8] * 16):  # the second takes the partial tail, the third a head
                await post(running.url + "/v1/completions", body | {"prompt": prompt})
            assert await gauge(running.url, STRANDED) == stranded
            _, page = await get(running.url + "/metrics")
            assert (
                f"# HELP {STRANDED} Tokens whose KV is resident" in page
                and f"# TYPE {STRANDED} gauge" in page
            )

    asyncio.run(run())


class Held:
    """A runner whose steps wait for leave."""

    def __init__(self, runner: Any) -> None:
        self.runner, self.began, self.leave = runner, threading.Event(), threading.Event()

    def run(self, batch: Any) -> tuple[tuple[Work, ...], Any]:
        """As the real one, later."""
        self.began.set()
        assert self.leave.wait(WAIT_S)
        result: tuple[tuple[Work, ...], Any] = self.runner.run(batch)
        return result


def test_a_page_does_not_wait_for_a_step_and_a_question_is_no_waiting_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stranded_tokens, "COUNTED_AGAIN_S", 0.0)
    monkeypatch.setattr(stranded_tokens, "PATIENCE_S", 0.001)
    held: list[Held] = []

    def make(model: LoadedModel, limits: EngineLimits, seed: int) -> Engine:
        engine = Engine(model, limits, seed)
        held.append(Held(engine._runner))
        engine._runner = held[0]  # type: ignore[assignment]
        return engine

    async def run() -> None:
        async with replica(make) as running:
            url = running.url

            async def waiting(count: float) -> bool:
                return await gauge(url, "vllm:num_requests_waiting") == count

            asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 1}
            first = asyncio.create_task(post(url + "/v1/completions", asked))
            await asyncio.to_thread(held[0].began.wait, WAIT_S)
            for _ in range(3):
                assert await waiting(1.0), "handed over, and in its first step; the pages' question is none"
            both = asyncio.create_task(post(url + "/v1/completions", asked | {"prompt": [PROMPT, PROMPT]}))
            await until(lambda: waiting(3.0))
            held[0].leave.set()
            assert [status for status, _ in await asyncio.gather(first, both)] == [200, 200]
            await until(lambda: waiting(0.0))
            assert await gauge(url, STRANDED) == 0.0

    asyncio.run(run())
