"""A publisher of KV events, the router's feed, and a fleet of two of which replica 0 publishes."""

import random
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from router.config import parse_config
from router.proxy.counters import Counters, KvEventCounters
from router.proxy.kv_event_feed import KvEventFeed
from router.routing.block_naming import BlockNaming
from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.policies import POLICIES
from router.routing.replica_state import ReplicaSpec
from tests.fakes.fake_publisher import FakePublisher
from tests.fakes.proxy_rig import until

SIZE = 2
NAMING = BlockNaming("warmroute", SIZE)


def stored(*tokens: int, parent: int | None = None) -> BlocksStored:
    return BlocksStored(tuple(NAMING.keys(tokens)), parent, tokens, SIZE)


def removed(*tokens: int) -> BlocksRemoved:
    """The last block of these tokens."""
    return BlocksRemoved((NAMING.keys(tokens)[-1],))


class Scene:
    """One publisher, one feed, a fleet of two of which replica 0 publishes."""

    def __init__(self, publisher: FakePublisher, *, exact: bool) -> None:
        self.publisher = publisher
        self.clock_s = 0.0
        specs = [
            ReplicaSpec(f"r{i}", f"http://127.0.0.1:{9_000 + i}", blocks=BlockSettings("warmroute", SIZE))
            for i in range(2)
        ]
        policy = POLICIES["predicted_finish"](random.Random(1))
        self.fleet = Fleet(specs, policy, FleetSettings(exact=exact))
        self.router_counters = Counters()
        self.feed: KvEventFeed | None = None

    async def subscribe(self, **kv_events: Any) -> None:
        replicas = [{"url": r.spec.url, "name": r.name} for r in self.fleet.replicas]
        replicas[0]["kv_events"] = kv_events  # type: ignore[assignment]
        config = parse_config({"replicas": replicas}, "test")
        self.feed = KvEventFeed(self.fleet, config, self.router_counters, clock=lambda: self.clock_s)
        await self.feed.start()

    @property
    def counters(self) -> KvEventCounters:
        return self.router_counters.kv_events["r0"]

    @property
    def held(self) -> set[int]:
        return self.fleet.caches.exact.told.names(0)

    async def caught_up(self) -> None:
        """Everything sent so far was taken: a last batch came through."""
        mark = (7, len(self.publisher.kept) + 100)
        await self.publisher.publish(stored(*mark))
        await until(lambda: NAMING.keys(mark)[0] in self.held)
        self.fleet.caches.exact.told.removed(0, NAMING.keys(mark))


def play(
    scenario: Callable[[Scene], Awaitable[None]],
    *,
    exact: bool = True,
    replay: bool = True,
    loop: Callable[..., Any] = uvloop.run,
    **publisher: Any,
) -> Scene:
    """Run ``scenario`` with a listening publisher and a connected subscriber."""

    async def run() -> Scene:
        scene = Scene(FakePublisher(**publisher), exact=exact)
        try:
            scene.publisher.listen()
            if replay:
                scene.publisher.listen_for_replay()
            await scene.subscribe(
                endpoint=scene.publisher.endpoint, replay=scene.publisher.replay_endpoint or None
            )
            await scene.publisher.subscribed()
            await scenario(scene)
            scene.fleet.caches.exact.check_invariants()
        finally:
            if scene.feed is not None:
                await scene.feed.stop()
            scene.publisher.stop()
        return scene

    result: Scene = loop(run())
    return result
