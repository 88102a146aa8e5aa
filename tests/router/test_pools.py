"""Two pools and pulls: where a request goes, from which figures, and that the ledger returns to zero."""

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.prefill_cost import DecodeCost
from router.proxy.explanation import explanation, lines
from router.routing.calibration import DEFAULT_PREFILL
from router.routing.decision import Decision, NoReplica, Reason
from router.routing.fleet import Fleet
from router.routing.in_flight import InFlight, Usage
from router.routing.kv_route import KvPull, Role, Step
from router.routing.policies import POLICIES
from router.routing.retry import Failure
from tests.router.pool_fleets import (
    LONG,
    SHORT,
    fleet_of,
    replica_spec,
    route_of,
    submitted,
    two_pools,
    two_steps,
)
from tests.router.small_fleet import BLOCK, at_rest, prompt


def test_a_fleet_without_roles_decides_as_it_did_and_its_decisions_have_no_route() -> None:
    plain = fleet_of(*(replica_spec(f"r{index}", pull=KvPull.NONE) for index in range(3)))
    flight = submitted(plain, prompt(*LONG))
    assert flight.decision.route is None and flight.decision.reason is Reason.COLD
    assert not plain.replicas.candidates(None, ()).moves_kv


def test_a_long_cold_prompt_is_prefilled_by_one_pool_and_answered_by_the_other() -> None:
    fleet = two_pools()
    asked = prompt(*LONG)
    price = fleet.traffic.decode_price
    first = submitted(fleet, asked)
    route = route_of(first.decision)
    assert (first.replica.name, route.step) == ("p", Step.PREFILL)
    assert route.transfer_s == pytest.approx(0.026 + 4.3e-6 * (asked.units - 1))
    # Direct: 1.6003 s of prefill, priced twice, and decoding. Two steps: the same once, 95 ms, one token.
    assert route.one_step_s is not None and route.two_steps_s is not None
    decoding_s = price * 256 * 0.01
    assert route.one_step_s == pytest.approx(2 * 1.6003 + decoding_s)
    one_token_s = price * 0.01
    # The pull stands in units of tokens in the policy's sum: rounded to one token's prefill, 0.1 ms.
    assert route.two_steps_s == pytest.approx(
        1.6003 + one_token_s + route.transfer_s + 1e-4 + decoding_s, abs=3e-4
    )
    assert first.booking.expected_output_tokens == 1
    fleet.finished(first, 1.6, Usage(asked.units, 1, 0))
    decision = fleet.decide_answerer(asked, 1.6, first.replica)
    assert decision.reason is Reason.HANDOFF and decision.replica in (1, 2)
    assert (route_of(decision).step, route_of(decision).other) == (Step.PULL, 0)
    assert decision.prefill_s == pytest.approx(route.transfer_s + 1e-4, abs=1e-6)
    second = fleet.sent(asked, decision, 1.6)
    assert second.booking.expected_output_tokens == 256
    fleet.first_token(second, 1.75)
    fleet.finished(second, 5.0, Usage(asked.units, 300, asked.units - 1))
    assert at_rest(fleet)


@pytest.mark.parametrize(
    ("tokens", "cached", "queued_s", "one_step_ms", "two_steps_ms"),
    [
        (8_192, 0, 0.0, 1_097.5, 614.1),
        (256, 0, 0.0, 40.1, None),
        (8_192, 8_000, 0.0, 35.0, None),
        (8_192, 0, 1.0, 1_097.5, 1_653.8),
    ],
)
def test_the_worked_example_in_the_docs(
    tokens: int, cached: int, queued_s: float, one_step_ms: float, two_steps_ms: float | None
) -> None:
    costs = {"prefill": DEFAULT_PREFILL, "decode": DecodeCost(0.0, 0.0)}
    fleet = fleet_of(
        replace(replica_spec("p", Role.PREFILL), **costs), replace(replica_spec("d", Role.DECODE), **costs)
    )
    asked = prompt(*range(tokens // BLOCK), tail=0)
    if cached:
        fleet.index.insert(1, asked.keys[: cached // BLOCK])
    if queued_s:
        fleet.sent(prompt(10**6), Decision(0, Reason.RETRY, 0, 0.0, queued_s), 0.0)  # no arrival
    route = route_of(fleet.explain(asked, 0.0, two_steps=True)[0])
    assert route.one_step_s == pytest.approx(one_step_ms / 1e3, abs=1e-4)
    if two_steps_ms is None:
        assert route.two_steps_s is None
        return
    # A pull is rounded to a whole token of prefill: 0.07 ms.
    assert route.two_steps_s == pytest.approx(two_steps_ms / 1e3, abs=1.5e-4)
    assert f"{two_steps_ms:,.1f}" in (Path(__file__).parents[2] / "docs" / "routing.md").read_text()


def test_short_ones_and_warm_ones_go_straight_to_the_decode_pool() -> None:
    fleet = two_pools()
    short = submitted(fleet, prompt(*SHORT))
    assert (short.replica.role, route_of(short.decision).step) == (Role.DECODE, Step.DIRECT)
    home = two_steps(fleet, prompt(*LONG), 0.0)
    again = submitted(fleet, prompt(*LONG, 7), 10.0)
    assert again.replica is home.replica and again.decision.reason is Reason.WARM
    assert route_of(again.decision).step is Step.DIRECT
    assert route_of(again.decision).two_steps_s is not None, "both were priced"


def test_a_warm_prefix_with_a_long_new_part_is_prefilled_apart() -> None:
    fleet = two_pools()
    home = two_steps(fleet, prompt(*LONG[:200]), 0.0)
    fleet.finished(home, 5.0)
    grown = submitted(fleet, prompt(*LONG), 10.0)
    assert grown.replica.name == "p" and grown.decision.matched_tokens == 200 * BLOCK
    assert route_of(grown.decision).moved_tokens == prompt(*LONG).units - 1 - 200 * BLOCK


def test_both_queues_count() -> None:
    fleet = two_pools()
    for _ in range(3):
        fleet.sent(
            prompt(*(random.Random(5).choices(range(10**6), k=1_000))),
            Decision(0, Reason.COLD, 0, 0.0, 1.6),
            0.0,
        )
    decision = submitted(fleet, prompt(*LONG)).decision
    assert route_of(decision).step is Step.DIRECT, "4.8 s of queue at the prefill pool: computed at once"
    busy = two_pools()
    busy.sent(prompt(1, 2), Decision(1, Reason.COLD, 0, 0.0, 1.0), 0.0)
    first = submitted(busy, prompt(*LONG))
    assert route_of(first.decision).other == 2, "the idle decode replica is expected to answer"


def test_the_pools_that_are_left() -> None:
    fleet = two_pools(both=1)
    asked = prompt(*LONG)
    for _ in range(3):
        fleet.probe_failed(0, 1.0, refused=True)
    decision = submitted(fleet, asked, 1.0).decision
    assert decision.replica == 3 and route_of(decision).two_steps_s is None, "no prefill pool: both computes"
    for index in (1, 2, 3):
        fleet.drained(index, 1.0)
    fleet = two_pools()
    for index in (1, 2):
        fleet.drained(index, 1.0)
    with pytest.raises(NoReplica, match="no decode replica"):
        fleet.submit(asked, 1.0, two_steps=True)


def test_after_the_first_step_failed() -> None:
    fleet = fleet_of(
        replica_spec("p1", Role.PREFILL),
        replica_spec("p2", Role.PREFILL),
        replica_spec("d", Role.DECODE),
    )
    asked = prompt(*LONG)
    first = submitted(fleet, asked)
    fleet.failed(first, 0.1, Failure.CONNECT)
    again = fleet.decide_prefill(asked, 0.1, tried=(first.replica.index,))
    assert again.reason is Reason.RETRY and {again.replica, first.replica.index} == {0, 1}
    with pytest.raises(NoReplica):
        fleet.decide_prefill(asked, 0.1, tried=(0, 1))
    direct = fleet.decide(asked, 0.1, tried=(0, 1))
    assert direct.replica == 2 and route_of(direct).step is Step.DIRECT
    assert at_rest(fleet)


def test_roles_may_change_while_it_runs() -> None:
    fleet = fleet_of(*(replica_spec(name, pull=KvPull.NONE) for name in ("a", "b")))
    plain = submitted(fleet, prompt(*LONG))
    assert plain.decision.route is None
    fleet.cancelled(plain, 1.0)
    fleet.replica_respecified(0, replica_spec("a", Role.PREFILL))
    fleet.replica_respecified(1, replica_spec("b", Role.DECODE))
    split = submitted(fleet, prompt(1, *LONG), 100.0)
    assert route_of(split.decision).step is Step.PREFILL
    fleet.cancelled(split, 101.0)
    fleet.replica_respecified(0, replica_spec("a", pull=KvPull.NONE))
    fleet.replica_respecified(1, replica_spec("b", pull=KvPull.NONE))
    assert submitted(fleet, prompt(2, *LONG), 200.0).decision.route is None


def test_a_decision_explains_both_ways() -> None:
    fleet = two_pools()
    told = explanation(fleet, *fleet.explain(prompt(*LONG), 0.0, two_steps=True))
    assert told["replica"] == "p" and [row["role"] for row in told["candidates"]] == [
        *("prefill", "decode", "decode")
    ]
    assert told["kv"]["step"] == "prefill" and told["kv"]["other"] in ("d1", "d2")
    assert told["kv"]["two_steps_ms"] < told["kv"]["one_step_ms"]
    (said,) = [line for line in lines(told) if line.startswith("KV, ")]
    assert "two steps: d" in said and "pulls 16002 tokens from it and answers (94.8 ms of transfer)" in said
    told = explanation(fleet, *fleet.explain(prompt(*SHORT), 0.0, two_steps=True))
    assert any("one step: it computes what it lacks; in total: one step" in line for line in lines(told))
    plain = fleet_of(replica_spec("a", pull=KvPull.NONE))
    assert explanation(plain, *plain.explain(prompt(*LONG), 0.0, two_steps=True))["kv"] is None


def test_of_many_replicas_some_are_priced() -> None:
    specs = [replica_spec(f"p{number}", Role.PREFILL) for number in range(50)]
    specs += [replica_spec(f"d{number}", Role.DECODE) for number in range(50)]
    fleet = fleet_of(*specs)
    home = two_steps(fleet, prompt(*LONG), 0.0)
    assert home.replica.role is Role.DECODE
    fleet.finished(home, 5.0)
    again = submitted(fleet, prompt(*LONG, 5), 10.0)
    assert again.replica is home.replica and route_of(again.decision).step is Step.DIRECT


def test_vllm_pools_hand_over_but_name_no_other_source() -> None:
    fleet = two_pools(pull=KvPull.VLLM)
    asked = prompt(*LONG)
    second = two_steps(fleet, asked, 0.0)
    assert second.pulled
    fleet.finished(second, 3.0, Usage(asked.units, 10, asked.units - 1))
    fleet.drained(second.replica.index, 3.0)
    after = submitted(fleet, prompt(*LONG, 8), 4.0).decision
    assert route_of(after).step in (Step.PREFILL, Step.DIRECT)


@pytest.mark.parametrize("kind", sorted(POLICIES))
def test_every_policy_keeps_to_the_roles(kind: str) -> None:
    fleet = two_pools(kind=kind, both=1)
    flights = []
    for turn in range(12):
        flight = submitted(fleet, prompt(turn, *LONG[: 1 + 90 * turn]), float(turn))
        step = route_of(flight.decision).step
        assert (flight.replica.role is Role.PREFILL) == (step is Step.PREFILL)
        flights.append(flight)
    for flight in flights:
        fleet.cancelled(flight, 20.0)
    assert at_rest(fleet)


def test_a_held_request_is_released_to_its_prefill_replica() -> None:
    fleet = fleet_of(replica_spec("p", Role.PREFILL), replica_spec("d", Role.DECODE), hold=True)
    first = submitted(fleet, prompt(*LONG[:400]))
    held = fleet.submit(prompt(1, *LONG), 0.0, two_steps=True)
    assert fleet.held == 1 and not isinstance(held, InFlight)
    fleet.finished(first, 1.6, Usage(16_003, 1, 0))
    assert fleet.outbox == [held] and held.flight is not None
    assert route_of(held.flight.decision).step is Step.PREFILL
    fleet.cancelled(held.flight, 2.0)
    assert at_rest(fleet)


ENDS: list[Callable[[Fleet, InFlight, float], None]] = [
    lambda fleet, flight, now: fleet.finished(flight, now, Usage(500, 20, 100)),
    lambda fleet, flight, now: fleet.failed(flight, now, Failure.CLOSED),
    lambda fleet, flight, now: fleet.cancelled(flight, now),
    lambda fleet, flight, now: fleet.refused(flight, now),
    lambda fleet, flight, now: (fleet.first_token(flight, now), fleet.finished(flight, now))[1],
]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 400), st.sampled_from(range(5))), max_size=40))
def test_however_steps_end_the_ledgers_return_to_zero(story: list[tuple[int, int, int]]) -> None:
    fleet, now, open_flights = two_pools(both=1), 0.0, list[tuple[InFlight, int]]()
    for stem, blocks, end in story:
        now += 0.3
        try:
            open_flights.append((submitted(fleet, prompt(stem, *LONG[:blocks]), now), end))
        except NoReplica:
            continue
        if len(open_flights) > 4:
            flight, end = open_flights.pop(0)
            ENDS[end](fleet, flight, now)
            if end == 0 and route_of(flight.decision).step is Step.PREFILL:
                try:
                    decision = fleet.decide_answerer(flight.prompt, now, flight.replica)
                except NoReplica:
                    continue
                assert decision.replica != flight.replica.index
                open_flights.append((fleet.sent(flight.prompt, decision, now), (end + blocks) % 5))
    for flight, end in open_flights:
        ENDS[end](fleet, flight, now + 1.0)
    assert at_rest(fleet)
