"""All KV event subscriptions of one router: one task per replica that has ``kv_events`` configured."""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from router.config import ConfigError, RouterConfig
from router.proxy.counters import Counters, KvEventCounters
from router.routing.fleet import Fleet

if TYPE_CHECKING:
    from router.proxy.kv_event_subscriber import KvEventSubscriber


def require_events_extra(config: RouterConfig) -> None:
    """Raise ``ConfigError`` if KV events are configured and what they need is not installed."""
    names = [replica.effective_name for replica in config.replicas if replica.kv_events is not None]
    missing = [package for package in ("zmq", "msgspec") if importlib.util.find_spec(package) is None]
    if names and missing:
        raise ConfigError(
            f"replicas.kv_events ({', '.join(names)}): not installed: {', '.join(missing)}; "
            "run `pip install 'warmroute[events]'` or remove kv_events"
        )


class KvEventFeed:
    """Without any ``kv_events`` in the config it does nothing and imports nothing."""

    def __init__(
        self,
        fleet: Fleet,
        config: RouterConfig,
        counters: Counters,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ``ConfigError`` when pyzmq or msgspec is needed and not installed."""
        require_events_extra(config)
        self._fleet = fleet
        self._config = config
        self._counters = counters
        self._clock = clock
        self._subscribers: dict[str, KvEventSubscriber] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._close: Callable[[], None] = lambda: None

    @property
    def endpoints(self) -> dict[str, str]:
        """By replica name: where its events are listened for, with the port really taken."""
        return {name: subscriber.endpoint for name, subscriber in self._subscribers.items()}

    async def start(self) -> None:
        """Subscribe. Raises ``OSError`` when an endpoint cannot be bound."""
        wanted = [
            (index, replica.effective_name, replica.kv_events)
            for index, replica in enumerate(self._config.replicas)
            if replica.kv_events is not None
        ]
        if not wanted:
            return
        import zmq.asyncio

        from router.proxy.kv_event_subscriber import KvEventSubscriber

        context = zmq.asyncio.Context()
        self._close = lambda: context.destroy(linger=0)
        try:
            for index, name, settings in wanted:
                counters = self._counters.kv_events.setdefault(name, KvEventCounters())
                subscriber = KvEventSubscriber(self._fleet, index, settings, counters, context, self._clock)
                self._subscribers[name] = subscriber
                self._tasks.append(asyncio.create_task(subscriber.run(), name=f"kv events {name}"))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all subscriptions."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks.clear()
        for subscriber in self._subscribers.values():
            subscriber.close()
        self._subscribers.clear()
        self._close()
        self._close = lambda: None
