"""Ends background tasks for certain, and what waits that were given up leave behind."""

import asyncio
import socket
from collections.abc import Iterable
from typing import Any

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


def unheard_faults(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """The loop's exception handler: as usual, but for names that nobody waits for any more.

    uvloop looks a name up in a thread; where the time-out of who asked comes first, the "no such name" that
    follows would be an error in the log each time. Who asked has told of its time-out.
    """
    if not isinstance(context.get("exception"), socket.gaierror):
        loop.default_exception_handler(context)
