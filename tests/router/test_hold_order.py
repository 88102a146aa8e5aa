"""Held requests that count on one another's prefixes: whoever computes goes first, and is worth more."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.block_source import BlockSettings
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held, HoldQueue
from router.routing.in_flight import InFlight
from router.routing.journal import Journal
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, TextLayout, UniformLayout
from router.routing.replica_state import ReplicaSpec

BLOCK = 16
DOCUMENT, OTHER, BUSY = 1, 2, 3


def make_fleet(*, exact: bool = False) -> Fleet:
    blocks = BlockSettings("warmroute", BLOCK)
    fleet = Fleet(
        [ReplicaSpec("r0", "http://r0", blocks=blocks)],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(hold=True, exact=exact),
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    fleet.probe_succeeded(0, 0.0)
    return fleet


def prompt(*parts: tuple[int, int], fleet: Fleet | None = None, priority: int = 0) -> Prompt:
    """Of parts (name, blocks). With ``fleet``: read token by token, in that fleet's naming."""
    keys = [name * 1_000_000 + block for name, blocks in parts for block in range(blocks)]
    chains = None if fleet is None else {fleet.caches.exact.naming(0): keys}
    made = Prompt(
        keys=keys, units=len(keys) * BLOCK + 3, layout=UniformLayout(BLOCK), stream=True, chains=chains
    )
    made.priority = priority
    return made


def held(fleet: Fleet, wanted: Prompt, now: float, context: str) -> Held:
    made = fleet.submit(wanted, now, context=context)
    assert isinstance(made, Held)
    return made


def order(fleet: Fleet, running: InFlight, now: float) -> list[Held]:
    """Who is sent, one after the other, each with its first token before the next."""
    out: list[Held] = []
    flights = [running]
    while flights:
        now += flights[0].decision.prefill_s
        fleet.first_token(flights.pop(0), now)
        out += fleet.outbox
        flights += [one.flight for one in fleet.outbox if one.flight is not None]
        fleet.outbox.clear()
    assert fleet.held == 0
    return out


def busy(fleet: Fleet) -> InFlight:
    flight = fleet.submit(prompt((BUSY, 900)), 0.0)
    assert isinstance(flight, InFlight)
    return flight


@pytest.mark.parametrize("exact", [False, True])
def test_a_follow_up_goes_after_the_prompt_it_counts_on(exact: bool) -> None:
    """Alone the follow-up would take 5 ms, but nobody has computed the document before it yet."""
    fleet = make_fleet(exact=exact)
    read = fleet if exact else None
    running = busy(fleet)
    document = held(fleet, prompt((DOCUMENT, 600), fleet=read), 0.0, "document")
    held(fleet, prompt((OTHER, 200), fleet=read), 0.0, "other")
    follow_up = held(fleet, prompt((DOCUMENT, 600), (9, 1), fleet=read), 0.0, "follow-up")
    assert follow_up.decision.matched_tokens == 600 * BLOCK
    assert follow_up.decision.wait_s > document.decision.prefill_s, "it knows what goes before it"
    assert [one.context for one in order(fleet, running, 0.0)] == ["other", "document", "follow-up"]


def test_a_prompt_that_many_count_on_goes_early() -> None:
    """0.65 s with four follow-ups of 5 ms: five waits end in 0.67 s, 0.13 s each; the other takes 0.2 s."""
    fleet = make_fleet()
    running = busy(fleet)
    held(fleet, prompt((DOCUMENT, 600)), 0.0, "document")
    held(fleet, prompt((OTHER, 200)), 0.0, "other")
    for name in range(10, 14):
        held(fleet, prompt((DOCUMENT, 600), (name, 1)), 0.0, "follow-up")
    names = [one.context for one in order(fleet, running, 0.0)]
    assert names == ["document", *["follow-up"] * 4, "other"]


def test_a_newcomer_does_not_slip_past_what_it_counts_on() -> None:
    """The replica has room for a small one, and the newcomer looks like a small one."""
    fleet = make_fleet()
    running = fleet.submit(prompt((BUSY, 1)), 0.0)
    assert isinstance(running, InFlight)
    held(fleet, prompt((DOCUMENT, 600)), 0.0, "document")
    held(fleet, prompt((DOCUMENT, 600), (9, 1)), 0.0, "follow-up")
    assert [one.context for one in order(fleet, running, 0.0)] == ["document", "follow-up"]


def test_one_whose_document_was_withdrawn_is_priced_anew() -> None:
    fleet = make_fleet()
    running = busy(fleet)
    document = held(fleet, prompt((DOCUMENT, 600)), 0.0, "document")
    follow_up = held(fleet, prompt((DOCUMENT, 600), (9, 1)), 0.0, "follow-up")
    held(fleet, prompt((OTHER, 200)), 0.0, "other")
    cold_s = document.decision.prefill_s
    fleet.dropped(document, 0.05)
    assert [one.context for one in order(fleet, running, 0.05)] == ["other", "follow-up"]
    assert follow_up.decision.matched_tokens == 0 and follow_up.decision.prefill_s > cold_s
    assert follow_up.flight is not None and follow_up.flight.booking.new_tokens == 601 * BLOCK + 3


def test_a_better_priority_goes_first_but_is_booked_as_what_it_is() -> None:
    fleet = make_fleet()
    running = busy(fleet)
    document = held(fleet, prompt((DOCUMENT, 600)), 0.0, "document")
    urgent = held(fleet, prompt((DOCUMENT, 600), (9, 1), priority=-1), 0.0, "urgent")
    assert [one.context for one in order(fleet, running, 0.0)] == ["urgent", "document"]
    assert urgent.decision.matched_tokens == 0
    assert urgent.decision.prefill_s > document.decision.prefill_s


@pytest.mark.parametrize("exact", [False, True])
def test_every_router_sees_the_same_order(exact: bool) -> None:
    here, there = make_fleet(exact=exact), make_fleet(exact=exact)
    journal = here.journal = Journal("a", here.caches.exact)
    busy(here)
    held(here, prompt((DOCUMENT, 600), fleet=here if exact else None), 0.0, "document")
    there.peers.told("a", journal.take(), 0.0)
    follow_up = held(there, prompt((DOCUMENT, 600), (9, 1), fleet=there if exact else None), 0.0, "follow-up")
    first = there.replicas[0].held.next(0.0)
    assert first is not None and first is not follow_up and not first.own


def test_a_match_told_by_a_router_with_another_ratio_is_the_same_block() -> None:
    """16 blocks are 1,024 tokens of 4 bytes each there; here a token is a thousandth shorter, or longer."""
    fleet = Fleet(
        [ReplicaSpec("r0", "http://r0")], POLICIES["predicted_finish"](random.Random(1)), FleetSettings()
    )
    text = Prompt(keys=list(range(40)), units=TextLayout().end(40))
    assert TextLayout().end(16) == 4_096
    for tokens in (1_023, 1_024, 1_025):
        assert fleet.caches.blocks_found(text, tokens) == 16
    assert fleet.caches.blocks_found(text, 0) == 0
    assert fleet.caches.blocks_found(text, 10**6) == 40


TREES = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), min_size=1, max_size=4),  # a path: who shares its beginning shares blocks
        st.integers(0, 3),
        st.floats(0.001, 9.0),
        st.floats(0.0, 9.0),
    ),
    max_size=12,
)


@given(waiting=TREES, at=st.floats(0.0, 9.0))
@settings(max_examples=60, deadline=None)
def test_nobody_goes_before_one_it_counts_on(
    waiting: list[tuple[list[int], int, float, float]], at: float
) -> None:
    queue = HoldQueue()
    there: set[tuple[int, ...]] = set()
    added: list[tuple[Held, list[Held]]] = []
    for path, opens, prefill_s, deadline in waiting:
        keys = [hash(tuple(path[: depth + 1])) & 0xFFFF_FFFF for depth in range(len(path))]
        known = max((depth for depth in range(len(path) + 1) if tuple(path[:depth]) in there), default=0)
        one = Held(
            Prompt(keys=keys, units=0), None, prefill_s, deadline, opens=max(known, min(opens, len(path)))
        )
        there.update(tuple(path[:depth]) for depth in range(len(path) + 1))
        counts_on = queue.counted_on(keys)
        rank_s = queue.rank_s(prefill_s, keys)
        assert rank_s == max([prefill_s, *(other.rank_s for other in counts_on)])
        queue.add(one)
        assert one.rank_s >= prefill_s and all(one.rank_s > other.rank_s for other in counts_on)
        added.append((one, counts_on))
    assert queue.prefill_s == pytest.approx(sum(one.prefill_s for one, _ in added))
    taken = [queue.take(at) for _ in added]
    for one, counts_on in added:
        assert all(taken.index(other) < taken.index(one) for other in counts_on)
    assert not len(queue)


@given(waiting=TREES)
@settings(max_examples=40, deadline=None)
def test_openers_are_found_by_the_prompt_and_by_the_queue_alike(
    waiting: list[tuple[list[int], int, float, float]],
) -> None:
    """A prompt of few blocks is looked up block by block, one of many by who is held: the same are found.

    Those of one rank may come in either order.
    """
    queue = HoldQueue()
    for path, opens, prefill_s, deadline in waiting:
        keys = [hash(tuple(path[: depth + 1])) & 0xFFFF_FFFF for depth in range(len(path))]
        queue.add(Held(Prompt(keys=keys, units=0), None, prefill_s, deadline, opens=min(opens, len(path))))
        found, among_many = queue.counted_on(keys), queue.counted_on([*keys, *range(1, 40)])
        assert {id(one) for one in found} == {id(one) for one in among_many}
        assert [one.rank_s for one in found] == [one.rank_s for one in among_many]
