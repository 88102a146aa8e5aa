"""Other routers' rules: each one's promise on candidates made by hand, and a run of every one."""

import random
from collections.abc import Sequence

import pytest

from replica.contract.load_report import LoadReport
from router.routing.decision import Decision, Reason
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec
from router.routing.view import Policy
from sim.contender import CONTENDERS
from sim.rivals import RIVALS
from sim.rivals.dualmap import DualMap
from sim.rivals.dynamo_cost import DynamoCost
from sim.rivals.least_requests import LeastRequests
from sim.rivals.llmd_sticky import LlmdSticky
from sim.rivals.llmd_weighted import LlmdWeighted
from sim.rivals.lmetric import LMetric
from sim.rivals.longest_match import LongestMatch
from sim.rivals.min_ttft import MinTtft
from sim.rivals.preble import PrebleE2
from sim.rivals.prequal import Prequal
from sim.rivals.rule import Rule
from sim.rivals.sglang_cache_aware import SglangCacheAware
from sim.simulate import simulate
from sim.simulated_router import SimulatedRouter
from sim.workload.sources import open_trace

LAYOUT = UniformLayout(100)


class Bench:
    """A router with one rule and four replicas; times are given by hand."""

    def __init__(self, rule: Rule, replicas: int = 4) -> None:
        self.fleet = Fleet(
            [ReplicaSpec(f"r{k}", "sim://") for k in range(replicas)],
            rule,
            FleetSettings(default_capacity_tokens=1_000_000),
            layout=LAYOUT,
            tokens_per_unit=1.0,
        )
        self.router = SimulatedRouter(self.fleet)
        self.now = 0.0

    def prompt(self, first: int, blocks: int, own: int | None = None) -> Prompt:
        """Blocks ``first * 1000 ...``; the last is ``own``, if given."""
        keys = [first * 1_000 + k for k in range(blocks)]
        if own is not None:
            keys[-1] = 10**6 + own
        return Prompt(keys=tuple(keys), units=100 * blocks + 50, layout=LAYOUT, stream=True)

    def ask(self, prompt: Prompt, now: float | None = None) -> InFlight:
        """Where the rule sends ``prompt``; it is sent."""
        made = self.router.submit(prompt, self.now if now is None else now, None, None)
        assert isinstance(made, InFlight)
        return made

    def put(self, replica: int, prompt: Prompt) -> InFlight:
        """``prompt`` on that replica, whatever the rule says."""
        matched = {
            index: tokens
            for mask, tokens in self.fleet.caches.levels(prompt)
            for index in range(len(self.fleet.replicas))
            if mask >> index & 1
        }.get(replica, 0)
        prefill_s = self.fleet.replicas[replica].cost.prefill_s(prompt.units - matched, matched)
        decided = Decision(replica, Reason.BALANCED, matched, 0.0, prefill_s)
        flight = self.fleet.sent(prompt, decided, self.now)
        self.router.sent(flight, self.now)
        return flight

    def end(self, *flights: InFlight) -> None:
        """One after another gets its first token, when that was predicted, and its last."""
        for flight in flights:
            self.now += flight.decision.prefill_s
            self.router.first_token(flight, self.now)
            self.router.refused(flight, self.now)

    def warm(self, replica: int, prompt: Prompt) -> None:
        """``replica`` computed ``prompt`` some time ago."""
        self.end(self.put(replica, prompt))


def rng() -> random.Random:
    return random.Random(5)


def test_least_requests_counts_requests_and_nothing_else() -> None:
    bench = Bench(LeastRequests(rng()))
    for replica in (0, 1, 2):
        bench.put(replica, bench.prompt(replica, 1))
    bench.put(0, bench.prompt(7, 500))
    assert bench.ask(bench.prompt(7, 500)).replica.index == 3


def test_longest_match_goes_there_whatever_the_queue() -> None:
    bench = Bench(LongestMatch(rng()))
    bench.warm(2, bench.prompt(1, 10))
    for other in range(10, 30):
        bench.put(2, bench.prompt(other, 300))
    assert bench.ask(bench.prompt(1, 10, own=1)).replica.index == 2


def test_min_ttft_leaves_when_the_queue_is_longer_than_what_the_hit_saves() -> None:
    bench = Bench(MinTtft(rng()))
    bench.warm(2, bench.prompt(1, 40))
    assert bench.ask(bench.prompt(1, 40, own=1)).replica.index == 2
    bench.put(2, bench.prompt(9, 100))
    flight = bench.ask(bench.prompt(1, 40, own=2))
    assert flight.replica.index != 2 and flight.decision.reason is Reason.SPILL


def test_lmetric_is_its_worked_example() -> None:
    bench = Bench(LMetric(rng()), replicas=2)
    bench.warm(0, bench.prompt(1, 30))
    bench.put(0, bench.prompt(3, 50))  # 5,050 tokens queued
    for _ in range(8):
        bench.router.first_token(bench.put(0, bench.prompt(4, 1)), bench.now)
    for _ in range(2):
        bench.router.first_token(bench.put(1, bench.prompt(5, 1)), bench.now)
    prompt = Prompt(
        keys=(*bench.prompt(1, 30).keys, *range(10**6, 10**6 + 10)),
        units=4_000,
        layout=LAYOUT,
        stream=True,
    )
    _, _, request = bench.fleet.explain(prompt, 0.0)
    scores = bench.fleet.policy.scores(request, bench.fleet.replicas)  # type: ignore[attr-defined]
    assert scores == [(5_050 + 1_000) * 10, 4_000 * 3]
    assert bench.ask(prompt).replica.index == 1


def test_lmetric_forgets_what_is_computed() -> None:
    bench = Bench(LMetric(rng()), replicas=2)
    flights = [bench.put(0, bench.prompt(k, 40)) for k in range(5)]
    bench.end(*flights)
    rule = bench.fleet.policy
    assert isinstance(rule, LMetric) and rule._pending.tokens(0) == 0


def test_dynamo_adds_blocks_to_compute_and_blocks_held() -> None:
    rule = DynamoCost(rng())
    bench = Bench(rule, replicas=2)
    held = bench.put(0, bench.prompt(1, 10))
    bench.router.first_token(held, 0.0)  # its prefill is over, its 10 blocks are active
    prompt = bench.prompt(1, 12)
    rule.arriving(prompt)
    _, _, request = bench.fleet.explain(prompt, 0.0)
    # replica 0: 12.5 - 10 cached; 10 active + 13 own - 10 shared. Replica 1: 12.5; 13 own.
    assert rule.scores(request, bench.fleet.replicas) == [2.5 + 13, 12.5 + 13]
    bench.end(held)
    assert rule._active.held == [0] * len(rule._active.held)


def test_llmd_weighted_trades_queue_memory_and_prefix() -> None:
    rule = LlmdWeighted(rng())
    bench = Bench(rule, replicas=3)
    bench.warm(0, bench.prompt(1, 10))
    prompt = bench.prompt(1, 10, own=1)

    def gauges(*rows: tuple[int, float]) -> Sequence[LoadReport | None]:
        return [LoadReport(waiting=waiting, kv_usage=usage) for waiting, usage in rows]

    rule.measured(bench.fleet.replicas, gauges((0, 0.5), (0, 0.5), (0, 0.5)), 0.0)
    assert bench.fleet.decide(prompt, 0.0).replica == 0  # a hit of .86 at equal load
    rule.measured(bench.fleet.replicas, gauges((9, 0.95), (0, 0.1), (1, 0.2)), 0.0)
    assert bench.fleet.decide(prompt, 0.0).replica == 1  # 3 x .86 < 2 x 1 + 2 x .85
    assert rule.metrics_every_s == 0.05


def test_llmd_sticky_stays_for_18_s_and_no_longer() -> None:
    bench = Bench(LlmdSticky(rng()), replicas=2)
    bench.warm(0, bench.prompt(1, 20))
    bench.put(0, bench.prompt(5, 2_800))  # 280,000 tokens: 17.5 s
    assert bench.ask(bench.prompt(1, 20, own=1)).replica.index == 0
    bench.put(0, bench.prompt(6, 200))
    assert bench.ask(bench.prompt(1, 20, own=2)).replica.index == 1


def test_llmd_sticky_takes_the_least_tokens_when_nobody_is_warm() -> None:
    bench = Bench(LlmdSticky(rng()), replicas=3)
    bench.put(0, bench.prompt(1, 5))
    bench.put(2, bench.prompt(2, 9))
    assert bench.ask(bench.prompt(3, 4)).replica.index == 1


def test_sglang_matches_then_balances() -> None:
    bench = Bench(SglangCacheAware(rng()))
    bench.warm(3, bench.prompt(1, 10))
    assert bench.ask(bench.prompt(1, 10, own=1)).replica.index == 3
    assert bench.ask(bench.prompt(2, 10)).replica.index == 0  # unknown: least loaded, the first of equals
    for k in range(64):
        bench.put(3, bench.prompt(50 + k, 1))
    assert bench.ask(bench.prompt(1, 10, own=2)).replica.index != 3  # 66 > 0 + 64 and 1.5 times


def test_sglang_follows_the_last_one_that_was_sent_a_prefix() -> None:
    bench = Bench(SglangCacheAware(rng()))
    bench.warm(3, bench.prompt(1, 10))
    bench.warm(2, bench.prompt(1, 10))
    assert bench.ask(bench.prompt(1, 10, own=1)).replica.index == 2


def test_sglang_wants_more_than_30_percent() -> None:
    bench = Bench(SglangCacheAware(rng()))
    bench.warm(3, bench.prompt(1, 3))
    keys = (*bench.prompt(1, 3).keys, *range(10**6, 10**6 + 7))
    prompt = Prompt(keys=keys, units=1_000, layout=LAYOUT, stream=True)  # exactly 30%
    assert bench.ask(prompt).replica.index == 0
    prompt = Prompt(keys=keys[:9], units=950, layout=LAYOUT, stream=True)
    bench = Bench(SglangCacheAware(rng()))
    bench.warm(3, bench.prompt(1, 3))
    assert bench.ask(prompt).replica.index == 3


def test_sglang_forgets_a_replica_that_is_gone() -> None:
    bench = Bench(SglangCacheAware(rng()))
    bench.warm(3, bench.prompt(1, 10))
    bench.fleet.drained(3, 0.0)
    assert bench.ask(bench.prompt(1, 10, own=1)).replica.index == 0
    bench.fleet.drained(3, 0.0, on=False)
    assert bench.ask(bench.prompt(1, 10, own=2)).replica.index == 0  # its tree is lost


def test_dualmap_knows_two_homes_per_prefix() -> None:
    bench = Bench(DualMap(rng()), replicas=8)
    where = set()
    for k in range(300):
        of_interest = k % 10 == 0
        flight = bench.ask(bench.prompt(1 if of_interest else 100 + k, 10, own=k))
        if of_interest:
            where.add(flight.replica.index)
    assert len(where) == 1  # the one that has it
    (first,) = where
    bench.put(first, bench.prompt(7, 1_000))  # more than 5 s of queue
    second = bench.ask(bench.prompt(1, 10, own=998)).replica.index
    assert second != first
    for k in range(20):
        assert bench.ask(bench.prompt(1, 10, own=999 + k)).replica.index in (first, second)


def test_dualmap_looks_deeper_where_everybody_shares_the_first_block() -> None:
    bench = Bench(DualMap(rng()), replicas=8)
    where = set()
    for k in range(200):
        keys = (1, 1_000 + k % 40, 10**6 + k)
        flight = bench.ask(Prompt(keys=keys, units=350, layout=LAYOUT, stream=True))
        bench.end(flight)
        where.add(flight.replica.index)
    assert len(where) > 3


def test_preble_exploits_what_is_mostly_cached_and_explores_the_rest() -> None:
    bench = Bench(PrebleE2(rng()))
    for replica in (0, 2, 3):
        bench.warm(replica, bench.prompt(30 + replica, 21))
    bench.warm(1, bench.prompt(1, 20))
    for k in range(3):
        assert bench.ask(bench.prompt(1, 20, own=k)).replica.index == 1
    keys = (*bench.prompt(1, 5).keys, *range(10**6, 10**6 + 15))
    explored = bench.ask(Prompt(keys=keys, units=2_050, layout=LAYOUT, stream=True))
    assert explored.replica.index != 1  # 5 of 20 blocks: the load decides


def test_preble_moves_a_prefix_whose_holder_is_overloaded() -> None:
    bench = Bench(PrebleE2(rng()))
    for k in range(20):
        bench.warm(1, bench.prompt(1, 20, own=k))
        for replica in (0, 2, 3):
            if k < 8:
                bench.warm(replica, bench.prompt(30 + replica, 20, own=100 + 10 * k + replica))
    flight = bench.ask(bench.prompt(1, 20, own=99))
    assert flight.replica.index != 1
    later = bench.now + 400.0  # the window has passed
    assert bench.ask(bench.prompt(1, 20, own=98), now=later).replica.index in (1, flight.replica.index)


def test_prequal_avoids_hot_replicas_and_long_queues() -> None:
    bench = Bench(Prequal(rng()), replicas=3)
    bench.put(0, bench.prompt(1, 500))
    for k in range(6):
        bench.put(1, bench.prompt(2, 20, own=k))
    assert [bench.ask(bench.prompt(5, 1), now=0.001 * k).replica.index for k in range(3)] == [2, 2, 2]


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_every_rule_serves_every_request_and_comes_out_the_same_twice(name: str) -> None:
    trace = open_trace("mooncake", requests=120)
    first, again = (simulate(trace, [name], replicas=3, rate=0.5)[0] for _ in range(2))
    assert first == again and first.errors == 0


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_rows_are_in_the_candidates_order(name: str) -> None:
    policy: Policy = RIVALS[name](rng())
    assert isinstance(policy, Rule)
    bench = Bench(policy, replicas=5)
    for k in range(8):
        bench.put(k % 5, bench.prompt(k, 3 + k))
    prompt = bench.prompt(2, 9)
    policy.arriving(prompt)
    decided, rows, _ = bench.fleet.explain(prompt, 0.0)
    assert [row.replica for row in rows] == [0, 1, 2, 3, 4]
    assert 0 <= decided.replica < 5


def test_rivals_and_policies_have_names_of_their_own() -> None:
    assert len(CONTENDERS) >= len(RIVALS) + 8
