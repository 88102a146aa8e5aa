"""One contract for all policies, and for each policy exactly what it promises."""

import random
from collections import Counter
from math import ceil

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from replica.contract.prefill_cost import DecodeCost, PrefillCost
from router.routing.calibration import ReplicaCost
from router.routing.decision import Reason
from router.routing.fleet_speed import FleetSpeed
from router.routing.policies import POLICIES
from router.routing.policies.bounded_hash import BoundedHash
from router.routing.policies.least_loaded import LeastLoaded
from router.routing.policies.load_measure import LOAD_MEASURES
from router.routing.policies.prefix_affinity import PrefixAffinity
from router.routing.policies.session import Session
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from tests.router.candidates import candidate, fleets, given_cost, policy, request, standing

Case = tuple[RoutingRequest, list[ReplicaState]]


@pytest.mark.parametrize("kind", POLICIES)
class TestEveryPolicy:
    @given(case=fleets(), seed=st.integers(0, 3))
    @settings(deadline=None, max_examples=60)
    def test_answers_with_a_candidate_and_its_own_numbers(self, kind: str, case: Case, seed: int) -> None:
        asked, candidates = case
        decision = policy(kind, seed).choose(asked, candidates)
        chosen = candidates[decision.replica]
        assert decision.matched_tokens == asked.matched_tokens[decision.replica]
        assert decision.wait_s == chosen.ledger.backlog_s(0.0)
        new = asked.prompt_tokens - decision.matched_tokens
        assert decision.prefill_s == pytest.approx(chosen.cost.prefill_s(new, decision.matched_tokens))
        cold = chosen.cost.prefill_s(asked.prompt_tokens, 0)
        assert decision.saved_s == pytest.approx(cold - decision.prefill_s, abs=1e-9)

    @given(case=fleets())
    @settings(deadline=None, max_examples=30)
    def test_same_seed_same_answer(self, kind: str, case: Case) -> None:
        assert policy(kind).choose(*case) == policy(kind).choose(*case)

    @given(case=fleets())
    @settings(deadline=None, max_examples=30)
    def test_assesses_every_candidate_in_order(self, kind: str, case: Case) -> None:
        asked, candidates = case
        rows = policy(kind).assess(asked, candidates)
        assert [row.replica for row in rows] == [candidate.index for candidate in candidates]
        assert [row.matched_tokens for row in rows] == list(asked.matched_tokens)

    def test_candidates_need_not_start_at_zero(self, kind: str) -> None:
        candidates = [candidate(5), candidate(7)]
        decision = policy(kind).choose(request(100, [0] * 8), candidates)
        assert decision.replica in (5, 7)

    def test_idle_equals_share_the_load(self, kind: str) -> None:
        chooser, candidates = policy(kind), [candidate(index) for index in range(4)]
        counts = Counter(chooser.choose(request(100, [0] * 4), candidates).replica for _ in range(2_000))
        assert min(counts.values()) > 400 and len(counts) == 4


@given(before=fleets(), case=fleets(), seed=st.integers(0, 3))
@settings(deadline=None, max_examples=60)
def test_predicted_finish_remembers_nothing_of_another_fleet(before: Case, case: Case, seed: int) -> None:
    used = policy("predicted_finish", seed)
    used.assess(*before)
    assert used.choose(*case) == policy("predicted_finish", seed).choose(*case)
    assert used.assess(*case) == policy("predicted_finish", seed).assess(*case)


def test_round_robin_counts_differ_by_at_most_one() -> None:
    chooser, candidates = policy("round_robin"), [candidate(index) for index in range(5)]
    counts: Counter[int] = Counter()
    for _ in range(23):
        counts[chooser.choose(request(10, [0] * 5), candidates).replica] += 1
        assert max(counts.values()) - min(counts[c.index] for c in candidates) <= 1


def test_round_robin_goes_on_when_one_leaves() -> None:
    chooser, candidates = policy("round_robin"), [candidate(index) for index in range(3)]
    asked = request(10, [0] * 3)
    assert chooser.choose(asked, candidates).replica == 0
    assert chooser.choose(asked, [candidates[0], candidates[2]]).replica == 2
    assert chooser.choose(asked, candidates).replica == 0


@pytest.mark.parametrize("measure", ["in_flight", "outstanding_tokens", "wait"])
@given(case=fleets())
@settings(deadline=None, max_examples=60)
def test_least_loaded_chooses_no_busier_one(measure: str, case: Case) -> None:
    asked, candidates = case
    chosen = LeastLoaded(random.Random(1), measure).choose(asked, candidates).replica
    load = LOAD_MEASURES[measure]
    assert load(candidates[chosen], 0.0) == min(load(candidate, 0.0) for candidate in candidates)


def test_weight_scales_load() -> None:
    candidates = [
        candidate(0, standing(outstanding_tokens=300), weight=4.0),
        candidate(1, standing(outstanding_tokens=100)),
    ]
    assert policy("least_loaded").choose(request(10, [0, 0]), candidates).replica == 0


def test_power_of_two_never_takes_the_busiest_alone() -> None:
    candidates = [candidate(index, standing(outstanding_tokens=index)) for index in range(3)]
    chooser = policy("power_of_two")
    counts = Counter(chooser.choose(request(10, [0] * 3), candidates).replica for _ in range(600))
    assert counts[2] == 0 and counts[0] > counts[1] > 0


# --- hashing: session and bounded_hash ------------------------------------------------------------


def ask(kind: str, key: int) -> RoutingRequest:
    asked = Prompt(keys=[1, 2, key * 7_919 + 1], units=2_000, layout=UniformLayout(100))
    session = f"session-{key}" if kind == "session" else None
    return RoutingRequest(0.0, 2_000, [0] * 8, session, asked)


@pytest.mark.parametrize("kind", ["session", "bounded_hash"])
class TestHashing:
    def test_one_key_one_replica_and_keys_spread(self, kind: str) -> None:
        chooser, candidates = policy(kind), [candidate(index) for index in range(4)]
        homes = [chooser.choose(ask(kind, key), candidates).replica for key in range(2_000)]
        assert homes == [chooser.choose(ask(kind, key), candidates).replica for key in range(2_000)]
        assert max(Counter(homes).values()) < 1.25 * min(Counter(homes).values())

    def test_only_the_keys_of_a_replica_that_leaves_move(self, kind: str) -> None:
        chooser, candidates = policy(kind), [candidate(index) for index in range(4)]
        before = [chooser.choose(ask(kind, key), candidates).replica for key in range(500)]
        after = [chooser.choose(ask(kind, key), candidates[:3]).replica for key in range(500)]
        assert [a for a, b in zip(after, before, strict=True) if b != 3] == [b for b in before if b != 3]

    @pytest.mark.parametrize("bound", [1.0, 1.25, 2.0])
    def test_B126_a_heavy_key_is_bounded(self, kind: str, bound: float) -> None:
        chooser = {"session": Session, "bounded_hash": BoundedHash}[kind](random.Random(1), bound)
        candidates = [candidate(index) for index in range(4)]
        for sent in range(100):  # all one key, nothing finishes
            decision = chooser.choose(ask(kind, 1), candidates)
            candidates[decision.replica].ledger.queued += 1
            most = max(candidate.ledger.queued for candidate in candidates)
            assert most <= ceil(bound * (sent + 1) / 4)

    def test_weights_share_in_proportion(self, kind: str) -> None:
        chooser = policy(kind)
        candidates = [candidate(0, weight=3.0), candidate(1)]
        counts = Counter(chooser.choose(ask(kind, key), candidates).replica for key in range(4_000))
        assert counts[0] / counts[1] == pytest.approx(3.0, rel=0.15)


def test_B126_no_session_is_not_one_session() -> None:
    candidates = [candidate(index) for index in range(4)]
    for empty in (None, ""):
        asked, chooser = request(100, [0] * 4), policy("session")
        asked.session = empty
        assert len({chooser.choose(asked, candidates).replica for _ in range(100)}) == 4


# --- prefix affinity: the spill threshold ---------------------------------------------------------


def spill_case(home_wait: float, *, saved_tokens: int = 2_900) -> tuple[RoutingRequest, list[ReplicaState]]:
    """Home 0 with 2,900 of 3,300 tokens cached at 31 µs a token (a hit worth 90 ms), 1 idle."""
    cost = given_cost(31e-6)
    candidates = [candidate(0, standing(backlog=home_wait), cost), candidate(1, standing(), cost)]
    return request(3_300, [saved_tokens, 0]), candidates


@pytest.mark.parametrize(
    ("price", "wait_ms", "stays"), [(0, 60, True), (0, 120, False), (1, 120, True), (1, 200, False)]
)
def test_the_worked_example_of_the_spill_threshold(price: float, wait_ms: float, stays: bool) -> None:
    asked, candidates = spill_case(wait_ms / 1_000)
    decision = PrefixAffinity(random.Random(1), price).choose(asked, candidates)
    assert decision.replica == (0 if stays else 1)
    assert decision.reason is (Reason.WARM if stays else Reason.SPILL)
    if not stays:
        assert decision.extra_wait_s == pytest.approx(wait_ms / 1_000)
        assert decision.spill_saved_s == pytest.approx(0.0897, abs=0.003)


@pytest.mark.parametrize(
    ("matched", "tokens", "universal", "newcomer"),
    [
        ([2_900, 2_900, 0], [8_000, 8_000, 0], 2_900, True),
        ([2_900, 2_900, 0], [8_000, 8_000, 2_500], 2_900, False),  # it has its share of work
        ([2_900, 2_900, 0], [8_000, 8_000, 0], 2_000, False),  # a conversation goes on where its turns are
        ([2_900, 2_900, 2_400], [8_000, 8_000, 0], 2_400, False),  # it holds that by now
        ([2_900, 0, 0], [8_000, 8_000, 0], 0, False),  # nothing shows that most ask for it
    ],
)
def test_what_most_traffic_begins_with_is_computed_by_who_has_next_to_nothing_to_do(
    matched: list[int], tokens: list[int], universal: int, newcomer: bool
) -> None:
    cost = given_cost(31e-6)
    candidates = [
        candidate(index, standing(decoding=int(some > 0), outstanding_tokens=some), cost)
        for index, some in enumerate(tokens)
    ]
    asked = request(3_300, matched, universal=universal)
    decision = PrefixAffinity(random.Random(1)).choose(asked, candidates)
    assert (decision.replica == 2) is newcomer
    assert decision.reason is (Reason.SPILL if newcomer else Reason.WARM)


@given(case=fleets(), price=st.sampled_from([0.0, 1.0, 2.5]), universal=st.sampled_from([0.0, 0.5, 0.9]))
@settings(deadline=None)
def test_home_is_left_only_beyond_the_threshold(case: Case, price: float, universal: float) -> None:
    asked, candidates = case
    asked.universal_tokens = int(universal * max(asked.matched_tokens))
    decision = PrefixAffinity(random.Random(1), price).choose(asked, candidates)
    longest = max(asked.matched_tokens)
    if decision.reason is Reason.SPILL:
        assert decision.matched_tokens < longest
        assert decision.extra_wait_s is not None and decision.spill_saved_s is not None
        if (
            decision.extra_wait_s <= (1 + price) * decision.spill_saved_s
        ):  # an idle one lacks what all ask for
            mean = sum(one.outstanding_tokens for one in candidates) / len(candidates)
            (chosen,) = [one for one in candidates if one.index == decision.replica]
            assert chosen.outstanding_tokens < mean / 4
            assert (
                decision.matched_tokens < asked.universal_tokens <= longest <= 1.25 * asked.universal_tokens
            )
    elif longest == 0:
        assert decision.reason is Reason.COLD


# --- predicted finish -----------------------------------------------------------------------------


def test_the_worked_example_of_the_priced_rule() -> None:
    """docs/routing.md: 1.20 against 1.20; one millisecond more at home and it spills."""
    nothing = DecodeCost(0.0, 0.0)
    cost_home = ReplicaCost(FleetSpeed(), PrefillCost(0.10, 0.0, 64_000.0), nothing)
    cost_other = ReplicaCost(FleetSpeed(), PrefillCost(0.60, 0.0, 64_000.0), nothing)
    asked = request(10_000, [8_000, 0], arrivals=1.0, price=0.05)

    def total(wait: float) -> list[float]:
        home = candidate(0, standing(queued=1, decoding=19, backlog=wait), cost_home)
        other = candidate(1, standing(), cost_other)
        return [row.total_s for row in policy("predicted_finish").assess(asked, [home, other])]

    # λ is A/N (W + T): 1.0 at home; at the idle one it is 0.6, so that its cost is 0.96, not 1.20.
    assert total(0.90) == pytest.approx([0.90 + 0.10 * (1 + 1 + 1), 0.60 * (1 + 0.6)])


def test_a_nearly_full_replica_is_dear_for_what_it_lacks_and_not_for_what_it_holds() -> None:
    """10,000 tokens, a reply of 100. The full one holds 9,000 of them: (1,000 + 100) / 10,100 of a second."""
    asked, full, empty = request(10_000, [9_000, 0]), candidate(0), candidate(1)
    full.room_price_s = 1.0
    chooser = policy("predicted_finish")
    warm, cold = chooser.assess(asked, [full, empty])
    assert warm.total_s - warm.prefill_s == pytest.approx(1_100 / 10_100)
    assert cold.total_s == cold.prefill_s  # it has room
    assert chooser.choose(asked, [full, empty]).reason is Reason.WARM
    assert chooser.choose(request(10_000, [0, 0]), [full, empty]).replica == 1


@given(case=fleets())
@settings(deadline=None)
def test_no_other_would_have_cost_less_unless_it_is_idle_and_alike(case: Case) -> None:
    asked, candidates = case
    chooser = policy("predicted_finish")
    chosen = chooser.choose(asked, candidates).replica
    rows = chooser.assess(asked, candidates)
    least = min(row.total_s for row in rows)
    cheapest = [row for row in rows if row.total_s == least]
    if rows[chosen] not in cheapest:
        assert not candidates[chosen].ledger.in_flight
        assert not candidates[cheapest[0].replica].ledger.in_flight
        assert rows[chosen].matched_tokens == cheapest[0].matched_tokens
        assert rows[chosen].total_s <= least * (1.0 + candidates[chosen].cost.doubt)


@given(case=fleets())
@settings(deadline=None)
def test_the_chosen_one_is_never_dominated(case: Case) -> None:
    asked, candidates = case
    chooser = policy("predicted_finish")
    chosen = chooser.choose(asked, candidates).replica
    rows = chooser.assess(asked, candidates)
    for row in rows:
        worse = (
            row.wait_s < rows[chosen].wait_s
            and row.prefill_s < rows[chosen].prefill_s
            and row.imposed_s < rows[chosen].imposed_s
        )
        assert not worse


@given(case=fleets(), more=st.integers(1, 10_000))
@settings(deadline=None)
def test_more_cached_tokens_never_make_a_replica_dearer(case: Case, more: int) -> None:
    asked, candidates = case
    chooser = policy("predicted_finish")
    before = chooser.assess(asked, candidates)[0].total_s
    matched = list(asked.matched_tokens)
    matched[0] = min(asked.prompt_tokens - 1, matched[0] + more)
    asked.matched_tokens = matched
    assert chooser.assess(asked, candidates)[0].total_s <= before * (1 + 1e-9)


@given(case=fleets(), queued=st.integers(0, 5), decoding=st.integers(0, 5), backlog=st.floats(0, 5))
@settings(deadline=None)
def test_more_load_never_makes_a_replica_cheaper(
    case: Case, queued: int, decoding: int, backlog: float
) -> None:
    asked, candidates = case
    chooser = policy("predicted_finish")
    before = chooser.assess(asked, candidates)[0].total_s
    ledger = candidates[0].ledger
    candidates[0].ledger = standing(
        queued=ledger.queued + queued,
        decoding=ledger.decoding + decoding,
        backlog=ledger.backlog_s(0.0) + backlog,
        load=ledger.load,
    )
    assert chooser.assess(asked, candidates)[0].total_s >= before * (1 - 1e-9)


@given(case=fleets(), factor=st.sampled_from([1e-3, 0.5, 3.0, 1e4]))
@settings(deadline=None)
def test_times_scaled_by_a_constant_change_nothing(case: Case, factor: float) -> None:
    """All takes ``factor`` times as long and arrives that much more rarely: all costs scale with it."""
    asked, candidates = case
    rows = policy("predicted_finish").assess(asked, candidates)
    slower = []
    for one in candidates:
        ledger, fit = one.ledger, one.cost.fit
        scaled = standing(
            queued=ledger.queued,
            decoding=ledger.decoding,
            backlog=factor * ledger.backlog_s(0.0),
            load=ledger.load,
        )
        cost = given_cost(factor * fit.prefill_per_token_s, factor * fit.step_fixed_s)
        slower.append(candidate(one.index, scaled, cost))
        slower[-1].room_price_s = factor * one.room_price_s
    again = request(
        asked.prompt_tokens,
        asked.matched_tokens,
        arrivals=asked.arrivals_per_replica_s / factor,
        utilization=asked.fleet_utilization,
        price=asked.decode_price,
        copy_price=asked.copy_price,
    )
    for row, scaled_row in zip(rows, policy("predicted_finish").assess(again, slower), strict=True):
        assert scaled_row.total_s == pytest.approx(factor * row.total_s, rel=1e-6, abs=1e-12)


def test_stays_warm_when_idle_and_spills_when_home_is_swamped() -> None:
    candidates = [candidate(0), candidate(1)]
    asked = request(4_000, [3_500, 0], arrivals=1.0, price=0.1)
    assert policy("predicted_finish").choose(asked, candidates).reason is Reason.WARM
    candidates[0].ledger = standing(queued=12, backlog=5.0)
    decision = policy("predicted_finish").choose(asked, candidates)
    assert (decision.replica, decision.reason) == (1, Reason.SPILL)


def test_a_shared_system_prompt_does_not_pile_up() -> None:
    """With every replica warm for the head, running streams alone tell them apart."""
    candidates = [candidate(index, standing(decoding=index * 5)) for index in range(3)]
    asked = request(1_300, [1_200, 1_200, 1_200], arrivals=0.5, price=0.1)
    assert policy("predicted_finish").choose(asked, candidates).replica == 0
