"""KV events that are lost, come twice, anew or broken: repaired by replay, or held in doubt."""

import msgspec
import pytest

from replica.contract.kv_events import BlocksRemoved, BlocksStored, CacheEvent
from router.proxy import kv_event_replay
from router.proxy.kv_event_subscriber import REPLAY_PAUSE_S
from tests.fakes.kv_event_scene import NAMING, Scene, play, removed, stored
from tests.fakes.proxy_rig import until

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
