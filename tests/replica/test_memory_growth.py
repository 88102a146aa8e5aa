"""B094: what was served leaves nothing behind, in the engine and in the server around it.

All 200,000 requests, by resident memory: ``python -m tests.replica.memory_slope``.
"""

import asyncio
import gc
import json
import tracemalloc
from collections.abc import Iterator

import aiohttp
import pytest

from tests.replica.models import finish_all, greedy_request, make_engine
from tests.replica.serving import replica


@pytest.fixture(autouse=True)
def traced() -> Iterator[None]:
    """Python's allocations are counted."""
    tracemalloc.start()
    yield
    tracemalloc.stop()


def _bytes_held() -> int:
    """By Python objects made since the test began."""
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def test_B094_a_finished_request_leaves_no_object_behind() -> None:
    engine = make_engine(kv_blocks=60, record_events=True)

    def serve(batches: int, first: int) -> int:
        for batch in range(first, first + batches):
            names = [f"{batch}.{number}" for number in range(25)]
            prompts = [[(batch * at + number) % 256 for at in range(20)] for number in range(25)]
            finish_all(engine, map(greedy_request, names, prompts, [1] * 25))
            engine.take_events()
        return _bytes_held()

    before, after = serve(30, 0), serve(40, 30)
    assert after - before < 1_000 * 16, "less than the smallest object each"


def test_B094_nor_does_the_server_keep_anything_of_it() -> None:
    async def run() -> None:
        async with replica(kv_tokens=512) as running, aiohttp.ClientSession() as session:

            async def ask(number: int) -> None:
                body = {"prompt": f"{number}", "max_tokens": 2, "stream": number % 2 == 0}
                async with session.post(running.url + "/v1/completions", data=json.dumps(body)) as answer:
                    assert answer.status == 200
                    await answer.read()

            async def serve(batches: int) -> int:
                for _ in range(batches):
                    await asyncio.gather(*map(ask, range(24)))
                return _bytes_held()

            before, after = await serve(8), await serve(20)
            assert after - before < 480 * 160, "less than a stream's objects each"

    asyncio.run(run())
