"""KV events over real ZMQ sockets: what a publisher tells is known, and what the config asks for."""

import asyncio
import importlib.util
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
import uvloop

from replica.contract.kv_events import CacheCleared
from replica.contract.kv_events_wire import Form
from router.config import parse_config
from router.config_errors import ConfigError
from router.proxy.counters import Counters
from router.proxy.kv_event_feed import KvEventFeed
from router.routing.block_naming import BlockNaming
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from tests.fakes.fake_publisher import FakePublisher
from tests.fakes.kv_event_scene import NAMING, Scene, play, removed, stored
from tests.fakes.proxy_rig import until
from tests.router.vllm_wire import BLOCK_TOKENS, wire_batches, wire_requests


@pytest.mark.parametrize("form", ["map", "array"])
@pytest.mark.parametrize("loop", [uvloop.run, asyncio.run], ids=["uvloop", "asyncio"])
def test_what_is_told_is_known(form: Form, loop: Callable[..., Any]) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.publisher.publish(stored(1, 2, 3, 4, 5, 6))
        await scene.publisher.publish(removed(1, 2, 3, 4, 5, 6), removed(1, 2, 3, 4))
        await scene.caught_up()
        assert scene.held == set(NAMING.keys([1, 2]))
        assert scene.fleet.caches.exact.told.held(1) == 0

    counters = play(scenario, form=form, loop=loop).counters
    assert (counters.batches, counters.stored_events, counters.removed_events) == (3, 2, 2)
    assert (counters.gaps, counters.duplicates, counters.malformed, counters.restarts) == (0, 0, 0, 0)


def test_a_recorded_vllm_is_followed_batch_by_batch() -> None:
    """Its payloads as they were; before every request the index says what vLLM then reported."""

    async def scenario(scene: Scene) -> None:
        exact, naming = scene.fleet.caches.exact, BlockNaming("sha256", BLOCK_TOKENS)
        exact.blocks_reported(0, BLOCK_TOKENS, "sha256")
        batches = iter(wire_batches())
        for request in wire_requests():
            keys = naming.keys(request.prompt_token_ids, request.cache_salt)
            levels = exact.levels({naming: keys}, request.prompt_tokens)
            assert levels == ([(1, request.cached_tokens)] if request.cached_tokens else [])
            if request.cached_tokens == 0:
                batch = next(batches)
                assert await scene.publisher.publish_payload(batch.payload) == batch.seq
                await until(lambda expected=batch.seq + 1: scene.counters.batches == expected)
        assert next(batches, None) is None

    scene = play_vllm(scenario)
    assert scene.counters.malformed == scene.counters.gaps == 0
    assert not scene.fleet.caches.exact.state(0).translated


def play_vllm(scenario: Callable[[Scene], Awaitable[None]]) -> Scene:
    """As vLLM with a concrete endpoint: it connects, the subscriber binds. Nothing is configured but that."""

    async def run() -> Scene:
        scene = Scene(FakePublisher(), exact=True)
        specs = [ReplicaSpec(f"r{i}", f"http://127.0.0.1:{9_000 + i}") for i in range(2)]
        scene.fleet = Fleet(specs, POLICIES["predicted_finish"](random.Random(1)), FleetSettings(exact=True))
        try:
            await scene.subscribe(endpoint="tcp://127.0.0.1:*", bind=True)
            assert scene.feed is not None
            scene.publisher.connect(scene.feed.endpoints["r0"])
            await scene.publisher.subscribed()
            await scenario(scene)
        finally:
            assert scene.feed is not None
            await scene.feed.stop()
            scene.publisher.stop()
        return scene

    return uvloop.run(run())


def test_only_the_topic_asked_for_is_taken() -> None:
    async def run() -> None:
        scene = Scene(FakePublisher(topic=b"kv@other"), exact=True)
        try:
            scene.publisher.listen()
            await scene.subscribe(endpoint=scene.publisher.endpoint, topic="kv@r0")
            await scene.publisher.subscribed()
            await scene.publisher.send(0, scene.publisher.payload([stored(1, 2)]))
            scene.publisher.topic = b"kv@r0"
            await scene.publisher.publish(stored(3, 4))
            await until(lambda: scene.held == set(NAMING.keys([3, 4])))
        finally:
            assert scene.feed is not None
            await scene.feed.stop()
            scene.publisher.stop()

    uvloop.run(run())


# --- text mode --------------------------------------------------------------------------------------


def text_prompt(keys: range) -> Prompt:
    return Prompt(keys=list(keys), units=len(keys) * 16, layout=UniformLayout(16), stream=True)


def test_in_text_mode_events_correct_the_text_index() -> None:
    async def scenario(scene: Scene) -> None:
        fleet, publisher = scene.fleet, scene.publisher
        for replica in (0, 1):
            fleet.index.insert(replica, range(1, 33))
        before = fleet.index.held(0)
        await publisher.publish(*(stored(number, number) for number in range(100)))
        await publisher.publish(*(removed(number, number) for number in range(50)))
        await until(lambda: scene.counters.removed_events == 50)
        assert 0.5 * before < fleet.index.held(0) < 0.8 * before, "about a third made room"
        assert fleet.index.held(1) == before
        await publisher.publish(CacheCleared())
        await until(lambda: fleet.index.held(0) == 0)
        assert fleet.index.held(1) == before, "black-box case 13: one replica alone"
        fleet.index.insert(0, range(1, 33))
        publisher.restart()
        await publisher.publish(stored(1, 2))
        await until(lambda: scene.counters.restarts == 1)
        assert fleet.index.held(0) == 0

    play(scenario, exact=False)


def test_lost_events_leave_the_text_index_alone() -> None:
    async def scenario(scene: Scene) -> None:
        scene.fleet.index.insert(0, range(1, 33))
        await scene.publisher.publish(stored(1, 2))
        scene.publisher.drop(stored(3, 4))
        await scene.publisher.publish(stored(5, 6))
        await scene.caught_up()
        assert scene.fleet.index.match(range(1, 33))[0] == 32

    assert play(scenario, exact=False, replay=False).counters.lost == 1


# --- configuration ----------------------------------------------------------------------------------


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == "zmq" else real(name, *rest)
    )
    config = parse_config(
        {"replicas": [{"url": "http://h:1", "name": "one", "kv_events": "tcp://h:5557"}]}, "x"
    )
    fleet = Fleet([], POLICIES["random"](random.Random(1)), FleetSettings())
    with pytest.raises(ConfigError) as caught:
        KvEventFeed(fleet, config, Counters())
    assert "one" in str(caught.value) and "warmroute[events]" in str(caught.value)
    assert "pyzmq" in str(caught.value)
    KvEventFeed(fleet, parse_config({"replicas": [{"url": "http://h:1"}]}, "x"), Counters())


def test_a_port_that_is_taken_is_an_os_error() -> None:
    async def run() -> None:
        scene = Scene(FakePublisher(), exact=True)
        try:
            scene.publisher.listen()
            with pytest.raises(OSError, match="kv_events endpoint tcp://127"):
                await scene.subscribe(endpoint=scene.publisher.endpoint, bind=True)
        finally:
            scene.publisher.stop()

    uvloop.run(run())


def test_a_plain_router_needs_none_of_the_extras() -> None:
    """The base install has no ZMQ, no tokenizers, no jinja2."""
    code = (
        "import sys\n"
        "for name in ('zmq', 'tokenizers', 'jinja2', 'torch'): sys.modules[name] = None\n"
        "from router.config import parse_config\n"
        "from router.proxy.assembly import Router\n"
        "Router(parse_config({'replicas': [{'url': 'http://h:1'}]}, 'x'))\n"
    )
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": ":".join(sys.path)}, check=True)
