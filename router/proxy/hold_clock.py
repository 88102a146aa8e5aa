"""While requests wait in the router, looks every few milliseconds whether time alone has made room."""

import asyncio

from router.proxy.service import Service

TICK_S = 0.01


class HoldClock:
    """Begins by itself when a request begins to wait, ends when none does."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._timer: asyncio.TimerHandle | None = None
        service.hold_began = self._tick_later

    def _tick_later(self) -> None:
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        service = self._service
        now = service.clock()
        service.fleet.tick(now)
        service.send_released(now)
        if service.fleet.held:
            self._tick_later()

    def stop(self) -> None:
        """The router stops."""
        if self._timer is not None:
            self._timer.cancel()
