"""``warmroute serve`` with a watch on its event loop: how long each turn held it.

Once in every turn it notes the processor time that the loop's thread has used since the turn before: that is
work of the router's own, whatever else runs on the machine. So the loop never rests. On SIGUSR1 the list of
those turns that took ``KEEP_FROM_MS`` or more is written to WATCH_FILE as JSON, in milliseconds, and begins
anew.
"""

import asyncio
import json
import os
import signal
import sys
import time
from pathlib import Path

import uvloop

from router.config import load_config
from router.proxy.assembly import Router, settle_garbage
from router.proxy.freed_memory import keep_freed_memory

KEEP_FROM_MS = 0.1


async def watched(path: str, out: Path) -> None:
    """Serve until SIGTERM; write the milliseconds held to ``out``."""
    loop = asyncio.get_running_loop()
    held_ms: list[float] = []
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)

    def write() -> None:
        nonlocal used
        part = out.with_suffix(".part")
        part.write_text(json.dumps(held_ms), encoding="utf-8")
        part.rename(out)
        held_ms.clear()
        used = time.thread_time()

    loop.add_signal_handler(signal.SIGUSR1, write)
    router = Router(load_config(path))
    await router.start()
    settle_garbage()  # as ``serve`` does
    used = time.thread_time()

    def look() -> None:
        nonlocal used
        now = time.thread_time()
        held = 1000.0 * (now - used)
        used = now
        if held >= KEEP_FROM_MS:
            held_ms.append(held)
        if not stop.is_set():
            loop.call_soon(look)

    look()
    await stop.wait()
    await router.stop()


if __name__ == "__main__":
    keep_freed_memory()
    uvloop.run(watched(sys.argv[1], Path(os.environ["WATCH_FILE"])))
