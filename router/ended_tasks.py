"""Ends background tasks for certain."""

import asyncio
from collections.abc import Iterable

CANCEL_AGAIN_S = 0.2


async def end_tasks(tasks: Iterable["asyncio.Task[None]"]) -> None:
    """Cancel ``tasks`` and wait until all have ended.

    Again and again: a client library whose own time-out comes in the same moment, or whose clean-up does, can
    take a cancellation for that and swallow it.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        done, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # whoever made it has told of its fault
