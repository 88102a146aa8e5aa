"""What a prefill teaches and when: at its first token, or at its end by what the replica reports."""

import random
from collections.abc import Callable

import pytest

from router.routing.calibration import DEFAULT_PREFILL, ReplicaCost
from router.routing.fleet import Fleet
from router.routing.in_flight import InFlight, Usage
from router.routing.retry import Failure
from tests.fakes.fake_replica import Send, completion, delta, sized, stream, usage_event
from tests.fakes.proxy_rig import CHAT_STREAM
from tests.fakes.router_rig import RouterRig, with_router
from tests.router import closed_loop, two_routers
from tests.router.closed_loop import COST, ClosedLoop
from tests.router.small_fleet import BLOCK, make_fleet, prompt, send

BLOCKS = 200
TOKENS = BLOCKS * BLOCK + 3
COLD_S = DEFAULT_PREFILL.seconds(TOKENS, 0)
HIT_S = DEFAULT_PREFILL.seconds(3, TOKENS - 3)
HIT = Usage(TOKENS, 5, TOKENS - 3)


def converse(loop: ClosedLoop, requests: int, rng: random.Random) -> list[float]:
    """Four users ask about 30 documents; after each answer, how many times what it takes a cold prefill is
    believed to take, or the other way round: of the replica that is furthest off."""
    left, off = requests, list[float]()

    def ask() -> None:
        nonlocal left
        left -= 1
        document = f"document {rng.randrange(30)}"
        loop.send(closed_loop.prompt((document, 3_200), (f"question {rng.random()}", 64)))

    for _ in range(4):
        ask()
    for _ in loop.answers():
        costs = [replica.cost.prefill_s(2_000, 0) / COST.seconds(2_000) for replica in loop.fleet.replicas]
        off.append(max(max(times, 1.0 / times) for times in costs))
        if left:
            ask()
    return off


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_router_started_in_front_of_warm_caches_does_not_learn_that_prefill_is_cheap(replicas: int) -> None:
    """Its index is empty, and what it takes for cold prompts is answered at once."""
    rng = random.Random(1)
    loop = ClosedLoop(closed_loop.make_fleet(replicas))
    assert converse(loop, 300, rng)[-1] < 1.05
    loop.fleet = closed_loop.make_fleet(replicas)
    # The prior is twice what it takes; where nothing is cold only the fixed part shows.
    assert max(converse(loop, 200, rng)[5:]) < (1.6 if replicas == 1 else 1.2)


def test_a_cleared_cache_does_not_teach_that_prefill_is_dear() -> None:
    rng = random.Random(2)
    loop = ClosedLoop(closed_loop.make_fleet(2))
    assert converse(loop, 300, rng)[-1] < 1.05
    for replica in loop.replicas:
        replica.computed.clear()
    assert max(converse(loop, 200, rng)) < 1.2


def begun(fleet: Fleet, took_s: float) -> InFlight:
    """A cold prompt whose first token comes after ``took_s``."""
    flight = send(fleet, prompt(*range(BLOCKS)), 0.0)
    fleet.first_token(flight, took_s)
    return flight


def taught(new_tokens: int, position: int, busy_s: float) -> float:
    """What a cold prefill is believed to take after that one lesson."""
    cost = make_fleet(1).replicas[0].cost
    cost.prefilled(busy_s, new_tokens, position)
    return cost.prefill_s(TOKENS, 0)


BY_BELIEF, BY_REPORT = (TOKENS, 0), (3, TOKENS - 3)


@pytest.mark.parametrize(
    ("end", "lesson"),
    [
        (lambda fleet, flight: fleet.finished(flight, 9.0, HIT), BY_REPORT),
        (lambda fleet, flight: fleet.finished(flight, 9.0), BY_BELIEF),
        (lambda fleet, flight: fleet.finished(flight, 9.0, Usage(TOKENS, 5)), BY_BELIEF),
        (lambda fleet, flight: fleet.finished(flight, 9.0, Usage(TOKENS, 5, TOKENS + 1)), BY_BELIEF),
        (lambda fleet, flight: fleet.cancelled(flight, 9.0), BY_BELIEF),
        (lambda fleet, flight: fleet.failed(flight, 9.0, Failure.BROKEN), BY_BELIEF),
    ],
)
def test_a_surprising_first_token_teaches_once_when_its_request_ends(
    end: Callable[[Fleet, InFlight], None], lesson: tuple[int, int]
) -> None:
    fleet = make_fleet(1)
    cost = fleet.replicas[0].cost
    flight = begun(fleet, HIT_S)
    assert cost.prefills_seen == 0
    for _ in range(2):
        end(fleet, flight)
        assert cost.prefills_seen == 1
        assert cost.prefill_s(TOKENS, 0) == pytest.approx(taught(*lesson, HIT_S))


@pytest.mark.parametrize(
    ("took_s", "at_once"),
    [
        (COLD_S, True),
        (0.4 * COLD_S, True),
        (2.5 * COLD_S, True),
        (10.0 * COLD_S, True),  # a slow replica: all of it was new
        (0.25 * COLD_S, False),  # a fast one, or hits
    ],
)
def test_a_first_token_teaches_at_once_unless_hits_would_explain_when_it_comes(
    took_s: float, at_once: bool
) -> None:
    fleet = make_fleet(1)
    cost = fleet.replicas[0].cost
    flight = begun(fleet, took_s)
    assert cost.prefills_seen == at_once
    fleet.finished(flight, 99.0, HIT)
    assert cost.prefills_seen == 1
    lesson = BY_BELIEF if at_once else BY_REPORT
    assert cost.prefill_s(TOKENS, 0) == pytest.approx(taught(*lesson, took_s))


def test_hits_that_may_be_gone_and_replicas_that_may_be_slow_are_told_apart() -> None:
    cost: ReplicaCost = make_fleet(1).replicas[0].cost
    assert cost.surprising(COLD_S, *BY_REPORT), "was its cache cleared?"
    assert not cost.surprising(COLD_S, 3, 40), "few tokens, cached or not, never take so long"
    assert not cost.surprising(0.0, *BY_REPORT), "with more hits it would take as long"


def test_an_answer_that_is_not_streamed_teaches_by_its_report() -> None:
    fleet = make_fleet(1)
    fleet.finished(send(fleet, prompt(*range(BLOCKS), stream=False), 0.0), HIT_S, HIT)
    assert fleet.replicas[0].cost.prefill_s(TOKENS, 0) == pytest.approx(taught(*BY_REPORT, HIT_S))


def test_other_routers_learn_by_the_report_too() -> None:
    here, journal = two_routers.make_fleet("a", replicas=1)
    there, _ = two_routers.make_fleet("b", replicas=1)
    costs = [fleet.replicas[0].cost for fleet in (here, there)]
    flight = two_routers.sent(here, 1, BLOCKS)
    there.peers.told("a", journal.take(), 0.0)
    here.first_token(flight, HIT_S)
    there.peers.told("a", journal.take(), HIT_S)
    assert [cost.prefills_seen for cost in costs] == [0, 0]
    here.finished(flight, 9.0, HIT)
    there.peers.told("a", journal.take(), 9.0)
    assert [cost.prefills_seen for cost in costs] == [1, 1]
    assert [cost.prefill_s(TOKENS, 0) for cost in costs] == pytest.approx(2 * [taught(*BY_REPORT, HIT_S)])


@pytest.mark.parametrize("streamed", [True, False])
def test_hits_that_nobody_knew_of_leave_a_long_prompt_as_dear_as_it_was(streamed: bool) -> None:
    """Over real sockets: 25,000 tokens, predicted to take seconds, are answered at once."""
    body = CHAT_STREAM | {"stream": streamed, "messages": [{"role": "user", "content": "wörds " * 16_000}]}
    usage = (25_000, 1, 24_990)

    async def scenario(rig: RouterRig) -> None:
        told = stream(delta("hi"), usage_event(*usage)) if streamed else sized(completion("hi", *usage))
        rig.replica.default = [Send(told)]
        assert (await rig.ask(body)).status == 200
        learned = (await rig.fleet())["r0"]["calibration"]
        assert learned["prefills_seen"] == 1 and learned["prefill_factor"] > 0.8

    with_router(scenario, policy={"kind": "predicted_finish"})


@pytest.mark.parametrize("first_s", [2.0 * COLD_S, 2.0 * HIT_S])
def test_first_tokens_of_one_step_teach_together(first_s: float) -> None:
    """All the time is the first one's, the other seems to have taken none."""
    fleet = make_fleet(1)
    flights = [send(fleet, prompt(*range(base, base + BLOCKS)), 0.0) for base in (0, 10_000)]
    for flight in flights:
        fleet.first_token(flight, first_s)
    assert fleet.replicas[0].cost.prefills_seen == (2 if first_s > COLD_S else 0)
    for flight in flights:
        fleet.finished(flight, 9.0, HIT)
    assert fleet.replicas[0].cost.prefills_seen == 2
