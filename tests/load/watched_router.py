"""``warmroute serve`` with a watch on its event loop: how long it was held between two looks.

A timer of one millisecond notes, each time it fires, the processor time that the loop's thread has used since
the last time: that is work of the router's own, whatever else runs on the machine. On SIGUSR1 the list begins
anew; at the end it is written to WATCH_FILE as JSON, in milliseconds.
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
from router.proxy.assembly import Router

LOOK_EVERY_S = 0.001


async def watched(path: str) -> list[float]:
    """Serve until SIGTERM; the milliseconds held."""
    loop = asyncio.get_running_loop()
    held_ms: list[float] = []
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    loop.add_signal_handler(signal.SIGUSR1, held_ms.clear)
    router = Router(load_config(path))
    await router.start()
    used = time.thread_time()

    def look() -> None:
        nonlocal used
        now = time.thread_time()
        held_ms.append(1000.0 * (now - used))
        used = now
        if not stop.is_set():
            loop.call_later(LOOK_EVERY_S, look)

    look()
    await stop.wait()
    await router.stop()
    return held_ms


if __name__ == "__main__":
    measured = uvloop.run(watched(sys.argv[1]))
    Path(os.environ["WATCH_FILE"]).write_text(json.dumps(measured), encoding="utf-8")
