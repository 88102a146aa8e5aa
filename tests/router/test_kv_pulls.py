"""Replicas that pull a prefix from another where that is cheaper than to compute it; what that teaches."""

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.prefill_cost import PrefillCost
from router.routing.decision import Decision, Reason
from router.routing.in_flight import Usage
from router.routing.kv_route import Step
from tests.router.pool_fleets import LONG, SHORT, fleet_of, replica_spec, route_of, two_pools, two_steps
from tests.router.small_fleet import BLOCK, at_rest, prompt


def test_without_roles_a_replica_pulls_what_another_holds_where_that_is_cheaper() -> None:
    fleet = fleet_of(replica_spec("a"), replica_spec("b"))
    asked = prompt(*LONG)
    home = fleet.sent(asked, fleet.decide(asked, 0.0), 0.0)
    fleet.first_token(home, 1.6)
    fleet.finished(home, 2.0, Usage(asked.units, 10, 0))
    assert fleet.decide(asked, 2.0).replica == home.replica.index, "where it is costs nothing"
    for _ in range(5):
        fleet.sent(
            prompt(*(random.Random(9).choices(range(10**6), k=900))),
            Decision(home.replica.index, Reason.COLD, 0, 0.0, 1.4),
            2.0,
        )
    decision = fleet.decide(asked, 2.0)
    assert decision.replica != home.replica.index and decision.reason is Reason.SPILL
    route = route_of(decision)
    assert (route.step, route.other, decision.matched_tokens) == (Step.PULL, home.replica.index, 0)
    missing = asked.units - route.tokens
    assert decision.prefill_s == pytest.approx(route.transfer_s + missing * 1e-4, abs=1e-6)


def test_a_pull_that_takes_longer_than_computing_is_not_named() -> None:
    fleet = fleet_of(replica_spec("a"), replica_spec("b"))
    asked = prompt(*SHORT)
    home = fleet.sent(asked, fleet.decide(asked, 0.0), 0.0)
    fleet.finished(home, 0.1, Usage(asked.units, 10, 0))
    fleet.drained(home.replica.index, 0.1)
    assert route_of(fleet.decide(asked, 0.2)).step is Step.DIRECT


@settings(max_examples=100, deadline=None)
@given(
    st.integers(2, 60_000),
    st.floats(0.0, 2.0),
    st.floats(1e-9, 1e-3),
    st.floats(1e-6, 1e-3),
    st.floats(1_000.0, 1e12),
)
def test_a_pull_is_priced_as_what_it_takes_and_never_more_than_computing(
    tokens: int, fixed_s: float, token_s: float, prefill_token_s: float, attention_tokens: float
) -> None:
    prefill = PrefillCost(0.001, prefill_token_s, attention_tokens)
    specs = [
        replace(replica_spec(name), prefill=prefill, transfer_fixed_s=fixed_s, transfer_token_s=token_s)
        for name in ("a", "b")
    ]
    fleet = fleet_of(*specs)
    asked = prompt(*range(tokens // BLOCK), tail=tokens % BLOCK + 1)
    fleet.index.insert(0, asked.keys)
    fleet.replicas[0].room_price_s = 1e9
    decision = fleet.decide(asked, 0.0)
    assert decision.replica == 1
    computed_s = prefill.seconds(asked.units)
    assert decision.prefill_s <= computed_s * (1 + 1e-6) + 1e-9
    if route_of(decision).step is Step.PULL:
        route = route_of(decision)
        assert decision.prefill_s == pytest.approx(
            route.transfer_s + prefill.seconds(asked.units - route.tokens, route.tokens), rel=1e-6
        )


def test_a_transfer_teaches_what_transfers_take_and_nothing_about_prefill() -> None:
    fleet = two_pools()
    before = fleet.replicas[1].cost.prefill_s(10_000, 0)
    declared = fleet.replicas[1].transfer.seconds(16_000, 0.0)
    asked = prompt(*LONG)
    for turn in range(20):
        now = 100.0 * turn
        second = two_steps(fleet, prompt(turn, *LONG), now)
        fleet.first_token(second, second.sent_at + 0.8)
        fleet.finished(second, second.sent_at + 2.0, Usage(asked.units, 20, asked.units - 1))
    fitted = [fleet.replicas[index].transfer.seconds(16_000, 1_910.0) for index in (1, 2)]
    assert max(fitted) > 4 * declared, "it takes 0.8 s here, not 0.095"
    assert fleet.replicas[1].cost.prefill_s(10_000, 0) == pytest.approx(before, rel=0.05)
    assert at_rest(fleet)
