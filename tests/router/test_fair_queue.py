"""Fair queueing: promises of deficit round robin, and nothing changed where there is one tenant."""

import random
from collections import deque
from dataclasses import dataclass, field
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.fair_queue import QUANTUM_TOKENS, FairQueue
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held, HoldQueue
from router.routing.in_flight import InFlight
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.routing.tenant import Tenant
from tests.router.turns import prompt, sent_in_turn

LATE = 1e9
SECONDS_PER_TOKEN = 1e-4


def held(
    tenant: str | None,
    tokens: int,
    *,
    weight: float = 1.0,
    priority: int = 0,
    deadline: float = LATE,
    number: int = 0,
    own: bool = True,
) -> Held:
    prompt = Prompt(keys=(), units=0)
    prompt.tenant = None if tenant is None else Tenant(tenant, weight=weight)
    prompt.priority = priority
    seconds = tokens * SECONDS_PER_TOKEN
    return Held(prompt, None, seconds, deadline, number=number, own=own, new_tokens=tokens)


def drained(queue: FairQueue, now: float = 0.0) -> list[Held]:
    out = []
    while (one := queue.next(now)) is not None:
        queue.sent(one)
        queue.check_invariants()
        out.append(one)
    return out


# --- one tenant -----------------------------------------------------------------------------------

ONE = st.tuples(
    st.sampled_from(["add", "remove", "send", "look"]),
    st.integers(1, 20),
    st.floats(0.0, 10.0),
    st.booleans(),
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(ONE, max_size=60), tenant=st.sampled_from([None, "a"]))
def test_with_one_tenant_it_is_the_hold_queue_to_the_bit(
    steps: list[tuple[str, int, float, bool]], tenant: str | None
) -> None:
    fair, plain = FairQueue(), HoldQueue()
    waiting: list[Held] = []
    for number, (step, tokens, at, own) in enumerate(steps):
        if step == "add":
            one = held(tenant, tokens, deadline=at, number=number, own=own)
            fair.add(one)
            plain.add(one)
            waiting.append(one)
        elif step == "remove" and waiting:
            one = waiting.pop(tokens % len(waiting))
            fair.remove(one)
            plain.remove(one)
        elif step == "send" and waiting:
            first = plain.take(at)
            assert fair.next(at) is first
            fair.sent(first)
            waiting.remove(first)
        newcomer = held(tenant, 1).prompt
        seconds = tokens * SECONDS_PER_TOKEN
        assert fair.next(at) is plain.next(at) and fair.next_own(at) is plain.next_own(at)
        assert (len(fair), fair.own, fair.prefill_s) == (len(plain), plain.own, plain.prefill_s)
        assert fair.ahead_s(seconds, newcomer) == plain.ahead_s(seconds)
        assert fair.behind(seconds, newcomer) == plain.behind(seconds)


# --- several --------------------------------------------------------------------------------------


@dataclass
class TextbookLane:
    weight: float
    queue: deque[int]
    deficit: float = 0.0


@dataclass
class Textbook:
    """Deficit round robin as it is written in the paper; lanes that become empty leave."""

    active: deque[TextbookLane] = field(default_factory=deque)

    def order(self) -> list[tuple[float, int]]:
        out = []
        while self.active:
            lane = self.active.popleft()
            lane.deficit += QUANTUM_TOKENS * lane.weight
            while lane.queue and lane.queue[0] <= lane.deficit:
                lane.deficit -= lane.queue[0]
                out.append((lane.weight, lane.queue.popleft()))
            if lane.queue:
                self.active.append(lane)
        return out


WEIGHTS = st.sampled_from([0.25, 0.5, 1.0, 3.0])  # exact in binary
COSTS = st.integers(1, 20_000)


@settings(max_examples=200, deadline=None)
@given(lanes=st.lists(st.tuples(WEIGHTS, st.lists(COSTS, min_size=1, max_size=8)), min_size=1, max_size=5))
def test_it_is_deficit_round_robin(lanes: list[tuple[float, list[int]]]) -> None:
    queue, textbook = FairQueue(), Textbook()
    for number, (weight, costs) in enumerate(lanes):
        textbook.active.append(TextbookLane(weight, deque(sorted(costs))))
        for cost in costs:
            queue.add(held(f"t{number}", cost, weight=weight))
    assert [(one.weight, one.new_tokens) for one in drained(queue)] == textbook.order()
    assert (len(queue), queue.own, queue.prefill_s) == (0, 0, 0.0)


@settings(max_examples=60, deadline=None)
@given(
    weights=st.lists(st.floats(0.05, 20.0), min_size=2, max_size=5),
    most=st.lists(COSTS, min_size=5, max_size=5),
    seed=st.integers(0, 999),
)
def test_lanes_that_never_run_empty_get_their_share_within_a_bound(
    weights: list[float], most: list[int], seed: int
) -> None:
    """Over any time: by weight, no further apart than a turn and each one's longest request."""
    rng = random.Random(seed)
    queue, served = FairQueue(), [0.0] * len(weights)

    def arrive(lane: int) -> None:
        tokens = rng.randint(1, most[lane])
        queue.add(held(str(lane), tokens, weight=weights[lane], number=rng.getrandbits(40)))

    for lane in range(len(weights)):
        for _ in range(3):
            arrive(lane)
    history = [list(served)]
    for _ in range(300):
        one = queue.next(0.0)
        assert one is not None
        queue.sent(one)
        lane = int(one.tenant)
        served[lane] += one.new_tokens / weights[lane]
        history.append(list(served))
        arrive(lane)
    begin = history[rng.randrange(len(history))]
    gained = [now - then for now, then in zip(history[-1], begin, strict=True)]
    for i, j in combinations(range(len(weights)), 2):
        bound = QUANTUM_TOKENS + most[i] / weights[i] + most[j] / weights[j]
        assert abs(gained[i] - gained[j]) <= bound + 1e-6 * max(gained)


@settings(max_examples=100, deadline=None)
@given(cost=COSTS, weight=WEIGHTS, others=st.lists(st.tuples(WEIGHTS, COSTS), min_size=1, max_size=4))
def test_nobody_starves(cost: int, weight: float, others: list[tuple[float, int]]) -> None:
    """Whatever the others keep sending, one request waits for no more than its turns let them."""
    queue = FairQueue()
    for number, (other, most) in enumerate(others):
        for _ in range(2):
            queue.add(held(str(number), most, weight=other))
    queue.add(held("small", cost, weight=weight))
    turns = 1 + cost / (QUANTUM_TOKENS * weight)
    most_tokens = sum((turns + 1) * QUANTUM_TOKENS * other + most for other, most in others)
    sent = 0
    while (one := queue.next(0.0)) is not None and one.tenant != "small":
        queue.sent(one)
        sent += one.new_tokens
        assert sent <= most_tokens
        queue.add(held(one.tenant, one.new_tokens, weight=one.weight))
    assert one is not None


STEP = st.tuples(
    st.sampled_from(["add", "drop", "send", "out of turn"]),
    st.sampled_from("abc"),
    st.integers(1, 3_000),
    st.integers(-1, 1),
)


@settings(max_examples=200, deadline=None)
@given(steps=st.lists(STEP, max_size=80))
def test_whatever_happens_counts_hold_and_all_go_in_the_end(steps: list[tuple[str, str, int, int]]) -> None:
    queue = FairQueue()
    waiting: list[Held] = []
    for number, (step, tenant, tokens, priority) in enumerate(steps):
        if step == "add":
            waiting.append(held(tenant, tokens, priority=priority, number=number, own=bool(number % 3)))
            queue.add(waiting[-1])
        elif waiting and step == "send":
            one = queue.next(0.0)
            assert one is not None
            queue.sent(one)
            waiting.remove(one)
        elif waiting:  # by its client, or by another router that saw the turns otherwise
            one = waiting.pop(tokens % len(waiting))
            (queue.remove if step == "drop" else queue.sent)(one)
            with pytest.raises(ValueError):
                queue.remove(one)
        queue.check_invariants()
        own = queue.next_own(0.0)
        assert (own is not None) == any(one.own for one in waiting) and (own is None or own.own)
        assert len(queue) == len(waiting)
    assert sorted(map(id, drained(queue))) == sorted(map(id, waiting))


def test_priorities_order_a_tenants_own_requests_and_nobody_elses() -> None:
    queue = FairQueue()
    for tenant, priority, tokens in (("a", 5, 100), ("a", 0, 500), ("b", 9, 500), ("a", -1, 500)):
        queue.add(held(tenant, tokens, priority=priority))
    order = [(one.tenant, one.priority) for one in drained(queue)]
    assert [one for one in order if one[0] == "a"] == [("a", -1), ("a", 0), ("a", 5)]
    assert order.index(("b", 9)) <= 1


def test_who_is_overdue_goes_first_among_its_own_and_not_before_other_tenants() -> None:
    """A flood is overdue as a whole: that must not put it before everybody."""
    queue = FairQueue()
    for number in range(10):
        queue.add(held("flood", 2_000 + number, deadline=float(10 - number)))
    queue.add(held("small", 100))
    order = drained(queue, now=100.0)
    assert [one.tenant for one in order].index("small") <= 1
    assert next(one.new_tokens for one in order if one.tenant == "flood") == 2_009


# --- in a fleet -----------------------------------------------------------------------------------


def make_fleet() -> Fleet:
    fleet = Fleet(
        [ReplicaSpec("r0", "http://r0")],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(hold=True),
        layout=UniformLayout(16),
        tokens_per_unit=1.0,
    )
    fleet.probe_succeeded(0, 0.0)
    return fleet


def test_a_flood_of_short_prompts_does_not_keep_out_a_long_one() -> None:
    """Shortest first alone would send all of the flood before it; by turns it waits for its share of them."""
    fleet = make_fleet()
    flood, other = Tenant("flood"), Tenant("other")
    running = fleet.submit(prompt(flood, 0, 500), 0.0)
    assert isinstance(running, InFlight)
    for name in range(1, 201):
        assert isinstance(fleet.submit(prompt(flood, name, 20), 0.0, context="flood"), Held)
    assert isinstance(fleet.submit(prompt(other, 999, 100), 0.0, context="other"), Held)
    order = sent_in_turn(fleet, running)
    assert len(order) == 201 and fleet.held == 0
    assert order.index("other") <= 12  # 1,600 tokens are four turns; so many of 320 tokens fit in those
