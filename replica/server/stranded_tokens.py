"""How much KV is resident that nobody can ever hit: counted between two steps, now and then, for /metrics."""

import asyncio
import contextlib
import time

from replica.engine import Engine
from replica.server.engine_thread import EngineDead, EngineThread

COUNTED_AGAIN_S = 10.0
"""To count takes a look at every block."""
PATIENCE_S = 0.05
"""A page does not wait longer for the step under way: it tells the number of the last count."""


class StrandedTokens:
    """The last count; asked for on the event loop, counted in the engine's thread."""

    def __init__(self, thread: EngineThread) -> None:
        self._thread = thread
        self._asked_s: float | None = None
        self._asking = False
        self.tokens = 0

    async def look(self) -> None:
        """Count, if the last count is old, and wait a little for it."""
        now_s = time.monotonic()
        if self._asking or (self._asked_s is not None and now_s - self._asked_s < COUNTED_AGAIN_S):
            return
        self._asking, self._asked_s = True, now_s
        with contextlib.suppress(EngineDead, TimeoutError):
            async with asyncio.timeout(PATIENCE_S):
                await self._thread.ask(self._count)

    def _count(self, engine: Engine) -> None:
        self.tokens = engine.stranded_tokens()
        self._asking = False
