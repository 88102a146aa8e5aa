"""KV events over real ZMQ sockets: what a publisher tells, loses, repeats and garbles."""

import asyncio
import importlib.util
import random
import subprocess
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import uvloop

from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent
from replica.contract.kv_events_wire import Form
from router.config import ConfigError, parse_config
from router.proxy import kv_event_replay
from router.proxy.counters import Counters, KvEventCounters
from router.proxy.kv_event_feed import KvEventFeed
from router.proxy.kv_event_subscriber import REPLAY_PAUSE_S
from router.routing.block_naming import BlockNaming
from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from tests.fakes.fake_publisher import FakePublisher
from tests.fakes.proxy_rig import until
from tests.router.vllm_wire import BLOCK_TOKENS, wire_batches, wire_requests

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


# --- what gets lost ---------------------------------------------------------------------------------


@pytest.mark.parametrize("old_replay", [False, True], ids=["with topic", "without topic"])
def test_a_gap_is_repaired_by_replay(old_replay: bool) -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        await publisher.publish(stored(1, 2, 3, 4))
        await scene.caught_up()
        publisher.drop(removed(1, 2, 3, 4))
        publisher.drop(stored(5, 6))
        await publisher.publish(stored(8, 9))
        await scene.caught_up()
        assert scene.held == {NAMING.keys(tokens)[0] for tokens in ([1, 2], [5, 6], [8, 9])}

    scene = play(scenario, old_replay=old_replay)
    assert scene.publisher.replays_asked == [2]
    counters = scene.counters
    assert (counters.gaps, counters.lost, counters.replay_failures) == (1, 0, 0)
    assert counters.replayed in (3, 4), "the replay brings the live ones, too"
    assert counters.batches == 6 and counters.malformed == 0


def test_a_late_subscriber_gets_what_it_missed() -> None:
    async def scenario(scene: Scene) -> None:
        for tokens in ((1, 2), (3, 4), (5, 6)):
            scene.publisher.drop(stored(*tokens))
        await scene.publisher.publish(removed(3, 4))
        await scene.caught_up()
        assert scene.held == {NAMING.keys(tokens)[0] for tokens in ([1, 2], [5, 6])}

    scene = play(scenario)
    assert scene.publisher.replays_asked == [0] and scene.counters.lost == 0


def test_without_replay_a_gap_leaves_what_was_told_in_doubt() -> None:
    """A lost batch is wrong in a few blocks: the rest of what was told stays, what was sent is guessed."""

    async def scenario(scene: Scene) -> None:
        await scene.publisher.publish(stored(1, 2, 3, 4))
        scene.publisher.drop(removed(1, 2, 3, 4))
        await scene.publisher.publish(stored(5, 6))
        await scene.caught_up()
        assert scene.held == {*NAMING.keys([1, 2, 3, 4]), *NAMING.keys([5, 6])}
        assert scene.fleet.caches.exact.state(0).doubted

    counters = play(scenario, replay=False).counters
    assert (counters.gaps, counters.lost, counters.replayed, counters.replay_failures) == (1, 1, 0, 0)


def test_a_replay_that_begins_too_late_leaves_what_was_told_in_doubt() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        await publisher.publish(stored(1, 2))
        await scene.caught_up()
        publisher.drop(removed(1, 2))
        publisher.drop(stored(5, 6))
        del publisher.kept[:3]  # what was dropped first is not kept any longer
        await publisher.publish(stored(8, 9))
        await scene.caught_up()
        assert scene.held == {NAMING.keys(tokens)[0] for tokens in ([1, 2], [5, 6], [8, 9])}
        assert scene.fleet.caches.exact.state(0).doubted

    counters = play(scenario).counters
    assert (counters.gaps, counters.lost) == (1, 1) and counters.replayed in (2, 3)


def test_a_replay_that_never_comes_is_given_up_and_not_tried_again_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kv_event_replay, "SILENCE_S", 0.05)

    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        assert publisher._serving is not None
        publisher._serving.cancel()
        for second, failures in ((0.0, 1), (1.0, 1), (REPLAY_PAUSE_S + 0.1, 2)):
            scene.clock_s = second
            await publisher.publish(stored(1, 2))
            publisher.drop(stored(3, 4))
            await publisher.publish(stored(5, 6))
            await scene.caught_up()
            assert scene.held == {NAMING.keys(tokens)[0] for tokens in ([1, 2], [5, 6])}
            assert scene.counters.replay_failures == failures

    assert play(scenario).counters.lost == 3


# --- what comes twice, anew, or broken --------------------------------------------------------------


def test_a_restart_is_seen_and_forgets_everything() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        for tokens in ((1, 2), (3, 4), (5, 6)):
            await publisher.publish(stored(*tokens))
        await scene.caught_up()
        publisher.restart()
        await publisher.publish(stored(8, 9))
        await until(lambda: scene.held == set(NAMING.keys([8, 9])))

    counters = play(scenario, replay=False).counters
    assert (counters.restarts, counters.gaps, counters.lost) == (1, 0, 0)


def test_a_restart_whose_first_batches_are_lost_is_replayed() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        for tokens in ((1, 2), (3, 4), (5, 6)):
            await publisher.publish(stored(*tokens))
        await scene.caught_up()
        publisher.restart()
        publisher.drop(stored(8, 9))
        await publisher.publish(stored(10, 11))
        await until(lambda: scene.held == {NAMING.keys(t)[0] for t in ([8, 9], [10, 11])})

    scene = play(scenario)
    assert (scene.counters.restarts, scene.counters.gaps, scene.publisher.replays_asked) == (1, 1, [0])


@pytest.mark.parametrize("batches", [1, 3, 5], ids=["fewer", "as many", "more"])
def test_a_restart_while_nobody_listened_is_seen_at_the_reconnect(batches: int) -> None:
    """The publisher told three batches, breaks off, begins anew and tells some more before it is back."""

    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        await publisher.publish(stored(1, 2))
        await publisher.publish(stored(3, 4))
        await scene.caught_up()
        publisher.break_off()
        publisher.restart()
        for number in range(batches):
            publisher.drop(stored(10 + number, 20))
        await publisher.come_back()
        anew = {NAMING.keys([10 + number, 20])[0] for number in range(batches)}
        await until(lambda: scene.held == anew)  # although it says nothing more
        await publisher.publish(stored(8, 9))
        await until(lambda: scene.held == anew | set(NAMING.keys([8, 9])))
        assert not scene.fleet.caches.exact.state(0).doubted

    scene = play(scenario)
    assert (scene.counters.reconnects, scene.counters.restarts, scene.counters.lost) == (1, 1, 0)


def test_what_was_told_while_nobody_listened_is_had_at_the_reconnect() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        await publisher.publish(stored(1, 2), stored(3, 4))
        await scene.caught_up()
        publisher.break_off()
        publisher.drop(removed(1, 2))
        publisher.drop(stored(5, 6))
        await publisher.come_back()
        await until(lambda: scene.held == {NAMING.keys(tokens)[0] for tokens in ([3, 4], [5, 6])})
        assert not scene.fleet.caches.exact.state(0).doubted

    counters = play(scenario).counters
    assert (counters.reconnects, counters.restarts, counters.gaps, counters.replayed) == (1, 0, 0, 2)


def test_nobody_to_ask_after_a_break_casts_doubt() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        await publisher.publish(stored(1, 2))
        await scene.caught_up()
        publisher.break_off()
        await publisher.come_back()
        await until(lambda: scene.fleet.caches.exact.state(0).doubted)
        assert scene.held == set(NAMING.keys([1, 2]))

    counters = play(scenario, replay=False).counters
    assert (counters.reconnects, counters.restarts) == (1, 0)


def test_duplicates_are_counted_and_change_nothing() -> None:
    async def scenario(scene: Scene) -> None:
        publisher = scene.publisher
        await publisher.publish(stored(1, 2))
        await publisher.publish(removed(1, 2))
        for seq, payload in list(publisher.kept) * 2:
            await publisher.send(seq, payload)
        await scene.caught_up()
        assert scene.held == set()

    counters = play(scenario).counters
    assert (counters.duplicates, counters.restarts, counters.gaps) == (4, 0, 0)


BAD_FRAMES: list[list[bytes]] = [
    [b"kv"],
    [b"kv", b"\0" * 8],
    [b"kv", b"\0" * 7, b"x"],
    [b"kv", b"\0" * 8, b"x", b"y"],
    [b"kv", b"\xff" * 8, b""],
    [b""],
]

BAD_PAYLOADS: list[bytes] = [
    b"",
    b"\xc1",
    msgspec.msgpack.encode({"ts": 1}),
    msgspec.msgpack.encode([1.0]),
    msgspec.msgpack.encode(["now", []]),
    msgspec.msgpack.encode([1.0, [["BlockStored"]]]),
    msgspec.msgpack.encode([1.0, [{"type": "BlockRemoved", "block_hashes": "abc"}]]),
    msgspec.msgpack.encode([1.0, [7]]),
]


def test_malformed_messages_are_counted_and_the_next_good_one_is_taken() -> None:
    async def scenario(scene: Scene) -> None:
        await scene.publisher.publish(stored(1, 2))
        for frames in BAD_FRAMES:
            await scene.publisher.send_frames(frames)
        await scene.caught_up()
        assert scene.held == set(NAMING.keys([1, 2])), "what was known is untouched"

    counters = play(scenario).counters
    assert (counters.malformed, counters.gaps) == (len(BAD_FRAMES), 0)


@pytest.mark.parametrize("payload", BAD_PAYLOADS)
def test_a_malformed_batch_leaves_what_was_told_in_doubt(payload: bytes) -> None:
    async def scenario(scene: Scene) -> None:
        await scene.publisher.publish(stored(1, 2))
        await scene.publisher.publish_payload(payload)
        await scene.publisher.publish(stored(3, 4))
        await scene.caught_up()
        assert scene.held == {NAMING.keys(tokens)[0] for tokens in ([1, 2], [3, 4])}
        assert scene.fleet.caches.exact.state(0).doubted

    counters = play(scenario).counters
    assert (counters.malformed, counters.lost, counters.gaps, counters.restarts) == (1, 1, 0, 0)


def test_strange_but_well_formed_events_do_no_harm() -> None:
    strange: list[CacheEvent] = [
        BlocksStored((), None, (), 0),
        BlocksStored((5,), 4, (), 16, medium="CPU", group=3),
        BlocksStored((-5,), -4, (1, 2), 2, medium=None),
        BlocksRemoved((1, 2, 3)),
        BlocksRemoved((), "STORAGE"),
    ]

    async def scenario(scene: Scene) -> None:
        await scene.publisher.publish(*strange)
        await scene.publisher.publish_payload(
            msgspec.msgpack.encode([2_000.0, [{"type": "FromTheFuture", "x": 1}], None, "more"])
        )
        await scene.caught_up()

    counters = play(scenario).counters
    assert (counters.malformed, counters.batches) == (0, 3)


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
