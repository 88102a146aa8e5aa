"""Background tasks end, whatever swallows their first cancellation."""

import asyncio
import gc
import socket

import pytest

from router.ended_tasks import end_tasks, unheard_faults


@pytest.mark.parametrize("swallowed", [0, 1, 3])
def test_a_swallowed_cancellation_comes_again(swallowed: int) -> None:
    """As aiohttp and redis-py do when their own time-out comes in the same moment."""
    seen = 0

    async def stubborn() -> None:
        nonlocal seen
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                seen += 1
                if seen > swallowed:
                    raise

    async def scenario() -> None:
        task = asyncio.create_task(stubborn())
        await asyncio.sleep(0)
        async with asyncio.timeout(10.0):
            await end_tasks([task])
        assert task.cancelled() and seen == swallowed + 1

    asyncio.run(scenario())


def test_a_task_that_failed_is_no_obstacle() -> None:
    async def fails() -> None:
        raise ValueError

    async def scenario() -> None:
        task = asyncio.create_task(fails())
        await asyncio.sleep(0)
        assert task.done()
        await end_tasks([task])
        await end_tasks([])

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("fault", "lines"), [(socket.gaierror(-2, "no such name"), 0), (OSError("other"), 1)]
)
def test_a_name_that_nobody_waits_for_is_no_error(
    fault: OSError, lines: int, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(unheard_faults)
        loop.create_future().set_exception(fault)  # and nobody holds it
        gc.collect()

    asyncio.run(scenario())
    assert len(caplog.records) == lines
