"""Numbers, leases, questions: what the tracker makes of batches, by values alone."""

import random

import pytest

from router.routing.fleet import Fleet, FleetSettings
from router.routing.peer_events import WorkSent
from router.routing.policies import POLICIES
from router.routing.replica_state import ReplicaSpec
from router.state.peer_tracker import ASK_AGAIN_S, ASK_FOR_PROMPTS, PeerTracker
from router.state.wire import EVERYBODY, Batch, WireError, decode_batch, decode_chunk, encode_batch

LEASE_S = 5.0


def make() -> tuple[PeerTracker, Fleet]:
    fleet = Fleet([ReplicaSpec("r0", "http://r0")], POLICIES["random"](random.Random(1)), FleetSettings())
    return PeerTracker("me", fleet.peers, LEASE_S), fleet


def sent(request: int) -> WorkSent:
    return WorkSent(request, "r0", 0.1, 0, 100, 10, 0.1, [request])


def statement(number: int, *requests: int) -> Batch:
    return Batch("you", number, [sent(request) for request in requests], outstanding=requests)


def test_batches_in_order_ask_nothing() -> None:
    tracker, fleet = make()
    tracker.received(statement(1), 0.0)
    for number in range(2, 6):
        tracker.received(Batch("you", number, [sent(number)]), 0.1)
    assert fleet.peers.outstanding("you") == 4 and not tracker.wants(1.0) and not tracker.gaps


def test_a_number_left_out_is_asked_for_until_a_statement_comes() -> None:
    tracker, fleet = make()
    tracker.received(statement(1, 1, 2, 3), 0.0)
    tracker.received(Batch("you", 4, [sent(7)]), 0.1)
    assert tracker.gaps == 1 and tracker.live["you"].gaps == 1
    assert tracker.wants(0.1) and tracker.ask(0.1) == (["you"], {"you": (2, 3)})
    assert not tracker.wants(0.1) and tracker.ask(0.1 + ASK_AGAIN_S) == (["you"], {"you": (2, 3)})
    tracker.received(statement(5, 2, 7), 0.5)
    assert fleet.peers.outstanding("you") == 2 and tracker.wants(9.0), "it was another's answer"
    tracker.received(Batch("you", 6, outstanding=(), again=(2, 5)), 0.6)
    assert not tracker.wants(9.0)


def test_who_cannot_tell_prompts_again_is_not_asked_for_ever() -> None:
    tracker, _ = make()
    tracker.received(statement(1), 0.0)
    tracker.received(
        statement(4), 0.1
    )  # after a fault: its work is known, the prompts of two batches are not
    assert tracker.gaps == 0
    for number in range(5, 5 + ASK_FOR_PROMPTS):
        assert tracker.ask(float(number)) == (["you"], {"you": (2, 3)})
        tracker.received(statement(number), float(number))
    assert not tracker.wants(99.0)


def test_questions_that_were_lost_do_not_make_another_routers_answer_do() -> None:
    tracker, _ = make()
    tracker.received(statement(1), 0.0)
    tracker.received(Batch("you", 4), 0.1)
    for second in range(1, 10):
        tracker.ask(float(second))
    tracker.received(statement(5), 10.0)
    assert tracker.ask(20.0) == (["you"], {"you": (2, 3)})


def test_what_was_missed_while_a_router_was_gone_is_asked_for() -> None:
    tracker, _ = make()
    tracker.received(statement(3), 0.0)
    assert tracker.expire(2 * LEASE_S) == ["you"]
    tracker.received(statement(9, 1), 3 * LEASE_S)
    assert tracker.ask(3 * LEASE_S) == (["you"], {"you": (4, 8)})


def test_prompts_are_told_again_for_all_who_lack_them() -> None:
    tracker, _ = make()
    for router, lacks in (("you", (7, 9)), ("he", (3, 4))):
        tracker.received(Batch(router, 1, outstanding=(), ask=["me"], lacks={"me": lacks}), 0.0)
    assert tracker.asked and tracker.lacked == (3, 9)


def test_what_comes_late_or_twice_is_not_used() -> None:
    tracker, fleet = make()
    tracker.received(statement(4, 1), 0.0)
    tracker.received(Batch("you", 3, [sent(9)]), 0.1)
    tracker.received(statement(4, 1, 2), 0.1)
    assert tracker.late == 2 and fleet.peers.outstanding("you") == 1


def test_who_is_heard_in_mid_stream_is_asked_for_the_rest() -> None:
    tracker, fleet = make()
    tracker.received(Batch("you", 41, [sent(40)]), 0.0)
    assert fleet.peers.outstanding("you") == 1 and tracker.ask(0.0) == (["you"], {}) and tracker.gaps == 0


def test_a_lease_ends_with_all_that_was_outstanding_and_is_told_once() -> None:
    tracker, fleet = make()
    tracker.received(statement(1, 1, 2), 0.0)
    assert tracker.expire(LEASE_S) == []
    tracker.received(Batch("you", 2), LEASE_S)
    assert tracker.expire(2 * LEASE_S) == []
    assert tracker.expire(2 * LEASE_S + 0.1) == ["you"] and tracker.expire(99.0) == []
    assert fleet.replicas[0].in_flight == 0 and fleet.peers.outstanding("you") == 0


def test_who_leaves_is_gone_at_once() -> None:
    tracker, fleet = make()
    tracker.received(statement(1, 1), 0.0)
    tracker.received(Batch("you", 2, leaving=True), 0.1)
    assert not tracker.live and fleet.replicas[0].in_flight == 0
    tracker.received(Batch("stranger", 8, leaving=True), 0.2)
    assert not tracker.live


@pytest.mark.parametrize(
    ("ask", "asked"), [((), False), (("me",), True), (("he",), False), ((EVERYBODY,), True)]
)
def test_a_statement_is_made_for_who_asks(ask: tuple[str, ...], asked: bool) -> None:
    tracker, _ = make()
    tracker.received(Batch("you", 1, outstanding=(), ask=ask, warm_from="me" if asked else "he"), 0.0)
    assert tracker.asked is asked and tracker.to_warm == ({"you"} if asked else set())


def test_own_batches_tell_the_lag_and_nothing_else() -> None:
    tracker, fleet = make()
    tracker.sent(1, 10.0)
    tracker.received(Batch("me", 1, [sent(1)]), 10.004)
    assert tracker.lag_s == pytest.approx(0.004) and not tracker.live
    assert fleet.peers.outstanding("me") == 0 and tracker.batches == 0


def test_the_eldest_is_who_told_most() -> None:
    tracker, _ = make()
    assert tracker.eldest() is None
    for router, number in (("a", 3), ("b", 900), ("c", 20)):
        tracker.received(Batch(router, number, outstanding=()), 0.0)
    assert [tracker.eldest(), tracker.eldest({"b"}), tracker.eldest({"a", "b", "c"})] == ["b", "c", None]


@pytest.mark.parametrize(
    "event",
    [
        WorkSent(1, "r0", float("nan"), 0, 1, 1, 0.1, [1]),
        WorkSent(1, "r0", -1.0, 0, 1, 1, 0.1, [1]),
        WorkSent(1, "r0", 0.1, 0, -1, 1, 0.1, [1]),
        WorkSent(1, "r0", 0.1, 0, 1, 1, float("inf"), [1]),
        WorkSent(1, "r0", 0.1, 0, 1, 1, 0.1, [-1]),
        WorkSent(-1, "r0", 0.1, 0, 1, 1, 0.1, [1]),
    ],
)
def test_numbers_that_cannot_be_are_refused(event: WorkSent) -> None:
    with pytest.raises(WireError):
        decode_batch(encode_batch(Batch("you", 1, [event])))


def test_a_batch_comes_back_as_it_was_sent_and_junk_is_refused() -> None:
    batch = statement(3, 1, 2)
    back = decode_batch(encode_batch(batch))
    assert (back.router, back.number, list(back.outstanding or ())) == ("you", 3, [1, 2])
    assert list(back.events) == list(batch.events)
    rng = random.Random(1)
    whole = encode_batch(batch)
    for _ in range(2_000):
        junk = bytearray(whole[: rng.randrange(len(whole))])
        if junk:
            junk[rng.randrange(len(junk))] = rng.randrange(256)
        for decode in (decode_batch, decode_chunk):
            try:
                decode(bytes(junk))
            except WireError:
                continue
