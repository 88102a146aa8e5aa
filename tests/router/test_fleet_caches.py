"""The fleet with exact prompts and KV events: beliefs follow a request's life; nothing is left behind."""

import random

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.kv_events import BlocksRemoved, BlocksStored
from replica.contract.load_report import LoadReport
from router.routing.block_source import BlockSettings
from router.routing.decision import NoReplica
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.health import HealthSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout, read_prompt
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure

SIZE = 16


def make_fleet(replicas: int = 2, *, hold: bool = False, policy: str = "predicted_finish") -> Fleet:
    specs = [
        ReplicaSpec(f"r{index}", f"http://r{index}", blocks=BlockSettings("warmroute", SIZE))
        for index in range(replicas)
    ]
    settings_ = FleetSettings(exact=True, hold=hold, health=HealthSettings(failures_to_eject=3))
    fleet = Fleet(specs, POLICIES[policy](random.Random(1)), settings_)
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


def exact(fleet: Fleet, tokens: range | list[int], *, stream: bool = True) -> Prompt:
    chains = {naming: naming.keys(tokens) for naming in fleet.caches.exact.namings}
    first = next(iter(chains))
    return Prompt(
        keys=chains[first],
        units=len(tokens),
        layout=UniformLayout(first.block_tokens),
        stream=stream,
        chains=chains,
    )


def stored(fleet: Fleet, replica: int, tokens: range) -> BlocksStored:
    names = exact(fleet, tokens).keys
    event = BlocksStored(tuple(names), None, tuple(tokens)[: len(names) * SIZE], SIZE)
    fleet.blocks_stored(replica, event)
    return event


def matched(fleet: Fleet, tokens: range) -> list[int]:
    _, _, request = fleet.explain(exact(fleet, tokens), 0.0)
    return list(request.matched_tokens)


def test_lengths_are_known_to_the_token_whatever_the_ratio() -> None:
    fleet = make_fleet()
    _, _, request = fleet.explain(exact(fleet, range(1_234)), 0.0)
    assert request.prompt_tokens == 1_234
    flight = fleet.submit(exact(fleet, range(1_234)), 0.0)
    assert isinstance(flight, InFlight) and flight.replica.ledger.outstanding_tokens >= 1_234
    before = fleet.token_ratio.tokens_per_unit
    fleet.finished(flight, 1.0, Usage(1_300, 5, 0))
    assert fleet.token_ratio.tokens_per_unit == before, "exact prompts say nothing of bytes per token"


def test_a_request_goes_where_events_say_its_prefix_is() -> None:
    fleet = make_fleet(3)
    event = stored(fleet, 2, range(3_000))
    assert matched(fleet, range(3_200)) == [0, 0, 2_992]
    decision = fleet.decide(exact(fleet, range(3_200)), 0.0)
    assert decision.replica == 2 and decision.matched_tokens == 2_992
    fleet.blocks_removed(2, BlocksRemoved(event.block_hashes[100:]))
    assert matched(fleet, range(3_200)) == [0, 0, 1_600]
    fleet.cache_cleared(2)
    assert matched(fleet, range(3_200)) == [0, 0, 0]


def test_siblings_of_a_request_in_flight_meet_it() -> None:
    """Black-box case 7: a burst on a cold prefix, before any event."""
    fleet = make_fleet(4)
    for replica in range(4):
        stored(fleet, replica, range(900_000, 900_016))  # all of them tell
    first = fleet.submit(exact(fleet, range(20_000)), 0.0)
    assert isinstance(first, InFlight)
    here = first.replica.index
    assert matched(fleet, range(20_100))[here] == 20_000
    fleet.first_token(first, 1.0)
    stored(fleet, here, range(20_000))
    fleet.finished(first, 2.0, Usage(20_000, 5, 0))
    assert matched(fleet, range(20_100)) == [20_000 if replica == here else 0 for replica in range(4)]


@pytest.mark.parametrize("telling", [False, True])
@pytest.mark.parametrize("end", ["refused", "failed", "cancelled"])
def test_shed_and_failed_requests_leave_nothing(telling: bool, end: str) -> None:
    """Black-box case 14."""
    fleet = make_fleet(1)
    if telling:
        stored(fleet, 0, range(900_000, 900_016))
    flight = fleet.submit(exact(fleet, range(1_000)), 0.0)
    assert isinstance(flight, InFlight) and matched(fleet, range(1_000)) == [992]
    if end == "refused":
        fleet.refused(flight, 1.0)
    elif end == "failed":
        fleet.failed(flight, 1.0, Failure.CLOSED)
    else:
        fleet.cancelled(flight, 1.0)
    assert matched(fleet, range(1_000)) == [0]


def test_nothing_cached_where_much_was_guessed_drops_the_credit_within_one_request() -> None:
    fleet = make_fleet(1)
    for tokens in (range(2_000), range(10_000, 12_000)):
        flight = fleet.submit(exact(fleet, tokens), 0.0)
        assert isinstance(flight, InFlight)
        fleet.finished(flight, 1.0, Usage(2_000, 5, 0))
    flight = fleet.submit(exact(fleet, range(2_000)), 2.0)
    assert isinstance(flight, InFlight) and flight.decision.matched_tokens == 1_984
    fleet.finished(flight, 3.0, Usage(2_000, 5, 0))
    assert matched(fleet, range(2_000)) == [1_984], "what was just computed is there"
    assert matched(fleet, range(10_000, 12_000)) == [0]
    credit = fleet.replicas[0].credit
    assert (credit.predicted_tokens, credit.cached_tokens) == (1_984, 0)


def test_trusted_events_are_believed_rather_than_one_odd_answer() -> None:
    """A request that must not read the cache (prompt logprobs) reports 0 cached tokens."""
    fleet = make_fleet(1)
    stored(fleet, 0, range(2_000))
    flight = fleet.submit(exact(fleet, range(2_000)), 0.0)
    assert isinstance(flight, InFlight)
    fleet.finished(flight, 1.0, Usage(2_000, 5, 0))
    assert matched(fleet, range(2_000)) == [1_984]


@pytest.mark.parametrize("telling", [False, True])
def test_a_replica_nobody_listens_at_loses_what_was_guessed(telling: bool) -> None:
    fleet = make_fleet(2)
    if telling:
        stored(fleet, 0, range(1_000))
    else:
        flight = fleet.sent(exact(fleet, range(1_000)), fleet.decide(exact(fleet, range(1_000)), 0.0), 0.0)
        fleet.finished(flight, 1.0)
    replica = 0 if telling else flight.replica.index
    fleet.probe_failed(replica, 2.0, refused=True)
    assert max(matched(fleet, range(1_000))) == (992 if telling else 0), "events will tell of a restart"


def test_reports_bound_guesses_and_name_blocks() -> None:
    fleet = make_fleet(1)
    report = LoadReport(capacity_tokens=10 * SIZE, block_size=SIZE)
    fleet.load_reported(0, report, 0.0)
    flight = fleet.submit(exact(fleet, range(100 * SIZE)), 0.0)
    assert isinstance(flight, InFlight)
    fleet.finished(flight, 1.0)
    assert matched(fleet, range(100 * SIZE)) == [10 * SIZE]
    fleet.load_reported(0, LoadReport(block_size=64), 2.0)
    assert fleet.caches.exact.namings[0].block_tokens == 64


def test_text_and_exact_prompts_live_side_by_side() -> None:
    fleet = make_fleet(1)
    text = Prompt(keys=[1, 2, 3], units=3 * 256, stream=True)
    for prompt in (text, exact(fleet, range(160))):
        flight = fleet.submit(prompt, 0.0)
        assert isinstance(flight, InFlight)
        fleet.finished(flight, 1.0)
    assert fleet.index.match([1, 2, 3]) == [3] and matched(fleet, range(160)) == [144]
    fleet.cache_cleared(0)
    assert fleet.index.match([1, 2, 3]) == [0] and matched(fleet, range(160)) == [0]


@given(data=st.data(), hold=st.booleans())
@settings(max_examples=60, deadline=None)
def test_whatever_happens_nothing_is_expected_in_the_end(data: st.DataObject, hold: bool) -> None:
    """Sent, held, dropped, retried, failed; events, restarts, renamings meanwhile."""
    fleet = make_fleet(3, hold=hold)
    flights: list[InFlight] = []
    held: list[Held] = []
    now = 0.0

    def take_outbox() -> None:
        for one in fleet.outbox:
            held.remove(one)
            if one.flight is not None:
                flights.append(one.flight)
        fleet.outbox.clear()

    for _ in range(data.draw(st.integers(1, 40))):
        now += data.draw(st.sampled_from([0.0, 0.01, 5.0]))
        replica = data.draw(st.integers(0, 2))
        tokens = range(data.draw(st.integers(0, 2)), data.draw(st.integers(20, 600)))
        match data.draw(st.integers(0, 9)):
            case 0 | 1 | 2:
                try:
                    outcome = fleet.submit(exact(fleet, tokens, stream=data.draw(st.booleans())), now)
                except NoReplica:
                    continue
                (held if isinstance(outcome, Held) else flights).append(outcome)  # type: ignore[arg-type]
            case 3 if flights:
                fleet.first_token(data.draw(st.sampled_from(flights)), now)
            case 4 if flights:
                flight = flights.pop(data.draw(st.integers(0, len(flights) - 1)))
                fleet.finished(flight, now, data.draw(st.sampled_from([None, Usage(500, 5, 0)])))
            case 5 if flights:
                flight = flights.pop()
                end = data.draw(st.sampled_from(list(Failure)))
                fleet.failed(flight, now, end)
            case 6 if held:
                fleet.dropped(held.pop(data.draw(st.integers(0, len(held) - 1))), now)
            case 7:
                stored(fleet, replica, tokens)
            case 8:
                data.draw(st.sampled_from([fleet.cache_cleared, fleet.events_missed]))(replica)
            case _:
                fleet.load_reported(replica, LoadReport(block_size=data.draw(st.sampled_from([8, 16]))), now)
        fleet.tick(now)
        take_outbox()
        fleet.caches.exact.check_invariants()
    for one in list(held):
        fleet.dropped(one, now)
    held.clear()
    for flight in flights:
        fleet.cancelled(flight, now)
    take_outbox()
    for flight in flights:
        fleet.cancelled(flight, now)
    assert fleet.caches.exact.told.expected() == 0
    fleet.caches.exact.check_invariants()


def test_a_prompt_of_token_ids_says_how_long_it_is_and_teaches_nothing_about_text() -> None:
    fleet = make_fleet(1)
    asked = read_prompt(orjson.dumps({"model": "m", "prompt": list(range(10_000, 12_000)), "stream": True}))
    before = fleet.token_ratio.tokens_per_unit
    assert asked.tokens == 2_000 and before * asked.units > 2_500, "its digits, read as text, are more"
    for now, cached in ((0.0, 0), (1.0, 1_984)):
        flight = fleet.sent(asked, fleet.decide(asked, now), now)
        fleet.first_token(flight, now + 0.1)
        fleet.finished(flight, now + 0.2, Usage(2_000, 5, cached))
    assert 1_900 < flight.decision.matched_tokens < 2_000
    assert fleet.token_ratio.tokens_per_unit == before
