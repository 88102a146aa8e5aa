"""What most of the traffic begins with: counted, forgotten, and nobody's home for the priced rule."""

from router.routing.decision import Reason
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaSpec
from router.routing.universal_head import COUNT_EVERY, ENOUGH, FORGET_AT, UniversalHead
from tests.router.closed_loop import ClosedLoop, make_fleet, prompt


def count(head: UniversalHead, keys: list[int], times: int, model: str | None = None) -> None:
    for _ in range(times * COUNT_EVERY):
        head.asked(Prompt(keys=keys, units=len(keys) * 64, model=model))


def blocks(head: UniversalHead, keys: list[int], replicas: int, model: str | None = None) -> int:
    return head.blocks(Prompt(keys=keys, units=len(keys) * 64, model=model), replicas)


def test_only_what_more_than_two_of_n_begin_with_is_universal() -> None:
    head = UniversalHead()
    count(head, [1, 2, 3], 30)
    count(head, [1, 2, 9], 70)
    assert blocks(head, [1, 2, 3, 4], replicas=4) == 2  # 30% is less than half, of which 2/4 is more
    assert blocks(head, [1, 2, 3, 4], replicas=8) == 3  # more than 2/8
    assert blocks(head, [5, 2, 3, 4], replicas=8) == 0


def test_nothing_is_said_before_enough_was_counted() -> None:
    head = UniversalHead()
    count(head, [1, 2], ENOUGH - 1)
    assert blocks(head, [1, 2], replicas=4) == 0
    count(head, [1, 2], 1)
    assert blocks(head, [1, 2], replicas=4) == 2


def test_what_is_no_longer_asked_is_forgotten_and_memory_is_bounded() -> None:
    head = UniversalHead()
    count(head, [1, 2], 100)
    for number in range(3 * FORGET_AT):
        count(head, [10 * number + 1_000, 10 * number + 1_001], 1)
    assert blocks(head, [1, 2], replicas=64) == 0
    assert len(head._counts) < 3 * FORGET_AT


def test_each_model_has_its_own_traffic() -> None:
    head = UniversalHead()
    count(head, [1, 2], 90, model="large")
    count(head, [7, 8], 20, model="small")
    assert blocks(head, [7, 8], replicas=4, model="small") == 2
    assert blocks(head, [1, 2], replicas=4, model="large") == 2


def test_an_idle_replica_that_lacks_only_the_head_gets_a_request_and_then_holds_it() -> None:
    fleet = make_fleet(2)
    loop = ClosedLoop(fleet)
    for user in range(200):
        loop.send(prompt(("system", 2_048), (f"user {user}", 320)))
        if user % 20 == 19:
            loop.drain()
    loop.drain()
    for user in range(6):
        loop.send(prompt(("system", 2_048), (f"busy {user}", 320)))
    joined = fleet.replica_added(ReplicaSpec("new", "http://new")).index
    fleet.probe_succeeded(joined, loop.now)
    asked = prompt(("system", 2_048), ("another", 320))
    decision, rows, request = fleet.explain(asked, loop.now)
    assert (decision.replica, decision.reason) == (joined, Reason.BALANCED)
    row = next(row for row in rows if row.replica == joined)
    assert row.matched_tokens == 0 and request.universal_tokens >= 1_800
    assert row.total_s == min(row.total_s for row in rows)
    loop.send(asked)
    _, rows, request = fleet.explain(prompt(("system", 2_048), ("one more", 320)), loop.now)
    assert all(row.matched_tokens >= 2_048 for row in rows) and not request.universal_tokens


def test_a_session_does_not_leave_for_a_replica_that_lacks_more_than_the_head() -> None:
    fleet = make_fleet(2)
    loop = ClosedLoop(fleet)
    for user in range(200):
        loop.send(prompt(("system", 2_048), (f"user {user}", 320)))
        loop.drain()
    history = (("system", 2_048), ("session", 16_000))
    home = loop.send(prompt(*history))
    loop.drain()
    fleet.probe_succeeded(fleet.replica_added(ReplicaSpec("new", "http://new")).index, loop.now)
    loop.send(prompt(("system", 2_048), ("somebody", 320)))
    decision = fleet.decide(prompt(*history, ("next turn", 160)), loop.now)
    assert (decision.replica, decision.reason) == (home, Reason.WARM)
