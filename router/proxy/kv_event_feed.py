"""All KV event subscriptions of one router: one task per replica that has ``kv_events`` configured."""

import asyncio
import importlib.util
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.ended_tasks import end_tasks
from router.proxy.counters import Counters, KvEventCounters
from router.replica_config import KvEventsConfig
from router.routing.fleet import Fleet
from router.routing.replica_state import ReplicaState

if TYPE_CHECKING:
    import zmq.asyncio

    from router.proxy.kv_event_subscriber import KvEventSubscriber


def require_events_extra(config: RouterConfig) -> None:
    """Raise ``ConfigError`` if KV events are configured and what they need is not installed."""
    names = [replica.effective_name for replica in config.replicas if replica.kv_events is not None]
    names += [one.label for one in config.discovery if getattr(one, "kv_events_port", None) is not None]
    if names and importlib.util.find_spec("zmq") is None:
        raise ConfigError(
            f"replicas.kv_events ({', '.join(names)}): pyzmq is not installed; "
            "run `pip install 'warmroute[events]'` or remove kv_events"
        )


@dataclass(frozen=True, slots=True)
class _Subscription:
    subscriber: "KvEventSubscriber"
    task: "asyncio.Task[None]"


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
        """Raises ``ConfigError`` when pyzmq is needed and not installed."""
        require_events_extra(config)
        self._fleet = fleet
        self._config = config
        self._counters = counters
        self._clock = clock
        self._subscriptions: dict[ReplicaState, _Subscription] = {}
        self._context: zmq.asyncio.Context | None = None

    @property
    def endpoints(self) -> dict[str, str]:
        """By replica name: where its events are listened for, with the port really taken."""
        return {
            replica.name: subscription.subscriber.endpoint
            for replica, subscription in self._subscriptions.items()
        }

    async def start(self) -> None:
        """Subscribe to all that publish. Raises ``OSError`` when an endpoint cannot be bound."""
        published = {replica.effective_name: replica.kv_events for replica in self._config.replicas}
        try:
            for replica in self._fleet.replicas:
                settings = published.get(replica.name)
                if settings is not None:
                    self.subscribe(replica, settings)
        except BaseException:
            await self.stop()
            raise

    def subscribe(self, replica: ReplicaState, settings: KvEventsConfig) -> None:
        """Listen to ``replica``, too. Raises ``OSError`` when its endpoint cannot be bound."""
        import zmq.asyncio

        from router.proxy.kv_event_subscriber import KvEventSubscriber

        if self._context is None:
            self._context = zmq.asyncio.Context()
        counters = self._counters.kv_events.get(replica.name, KvEventCounters())
        subscriber = KvEventSubscriber(
            self._fleet, replica.index, settings, counters, self._context, self._clock
        )
        self._counters.kv_events[replica.name] = counters
        task = asyncio.create_task(subscriber.run(), name=f"kv events {replica.name}")
        self._subscriptions[replica] = _Subscription(subscriber, task)

    def unsubscribe(self, replica: ReplicaState) -> None:
        """Nothing is told of ``replica`` any more, if anything was."""
        subscription = self._subscriptions.pop(replica, None)
        if subscription is not None:
            subscription.task.add_done_callback(lambda _: subscription.subscriber.close())
            subscription.task.cancel()

    async def stop(self) -> None:
        """End all subscriptions."""
        tasks = [subscription.task for subscription in self._subscriptions.values()]
        for replica in list(self._subscriptions):
            self.unsubscribe(replica)
        await end_tasks(tasks)
        if self._context is not None:
            self._context.destroy(linger=0)
            self._context = None
