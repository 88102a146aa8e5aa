"""Limits: counted once, given back once, for the whole fleet while routers hear of each other."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import Journal
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.quota import Bucket, Quota, TenantLimits
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure
from router.routing.tenant import Tenant
from router.state.knowledge import taken_in, written_down

ACME = Tenant("acme", namespace="group g", index_share=0.5)


# --- one router -----------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    rate=st.floats(0.1, 50.0),
    share=st.sampled_from([1.0, 0.5, 0.25]),
    gaps=st.lists(st.floats(0.0, 2.0), min_size=1, max_size=60),
)
def test_a_rate_lets_through_what_it_says_and_one_burst(rate: float, share: float, gaps: list[float]) -> None:
    bucket, now, let_in = Bucket(rate), 1_000.0, 0
    bucket.wait_s(now, share)  # what was saved up at a full share is cut to the part
    for gap in gaps:
        now += gap
        wait_s = bucket.wait_s(now, share)
        if wait_s == 0.0:
            bucket.take(1.0, now, share)
            let_in += 1
        else:
            assert bucket.wait_s(now + 0.99 * wait_s, share) > 0.0  # not sooner than it said
            now += wait_s
            assert bucket.wait_s(now, share) < 1e-6
    elapsed = now - 1_000.0
    assert let_in <= max(1.0, rate) + rate * share * elapsed + 1e-6


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["begin", "end", "correct", "peer began", "peer ended", "limits", "share"]),
        st.integers(0, 500),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(steps=STEPS)
def test_so_many_at_once_and_never_more(steps: list[tuple[str, int]]) -> None:
    quota = Quota(TenantLimits(concurrent=3))
    own = peers = 0
    for number, (step, value) in enumerate(steps):
        now = float(number)
        most = quota.limits.concurrent
        assert most is not None
        if step == "begin":
            allowed = max(1, int(most * quota.share))
            refused = quota.refusal(now)
            assert (refused is None) == (own + peers < allowed)
            if refused is None:
                quota.began(value, now)
                own += 1
        elif step == "end" and own:
            quota.ended()
            own -= 1
        elif step == "correct":
            quota.corrected(-value, now)
        elif step == "peer began":
            quota.peer_began()
            peers += 1
        elif step == "peer ended" and peers:
            quota.peer_ended()
            peers -= 1
        elif step == "limits":
            quota.limits_changed(TenantLimits(concurrent=1 + value % 5))
        elif step == "share":
            quota.share = (1.0, 0.5)[value % 2]
        assert (quota.in_flight, quota.peers_in_flight) == (own, peers)
        assert quota.unused == (own + peers == 0)


# --- several routers ------------------------------------------------------------------------------


def make_fleet(name: str, limits: TenantLimits, *, hold: bool = False) -> tuple[Fleet, Journal]:
    fleet = Fleet(
        [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(2)],
        POLICIES["predicted_finish"](random.Random(1)),
        FleetSettings(hold=hold, default_capacity_tokens=10_000),
        layout=UniformLayout(16),
        tokens_per_unit=1.0,
    )
    for replica in range(2):
        fleet.probe_succeeded(replica, 0.0)
    fleet.tenants.applied([(ACME, limits)])
    fleet.tenants.sharing()
    fleet.journal = journal = Journal(name, fleet.caches.exact)
    return fleet, journal


def prompt(name: int, blocks: int = 100) -> Prompt:
    keys = [name * 1_000_000 + block for block in range(blocks)]
    made = Prompt(keys=keys, units=blocks * 16 + 3, layout=UniformLayout(16), stream=True)
    made.tenant = ACME
    return made


def test_what_one_router_lets_in_counts_at_the_other_until_it_ends() -> None:
    limits = TenantLimits(concurrent=1, tokens_per_s=10_000.0)
    (here, journal), (there, _) = make_fleet("a", limits), make_fleet("b", limits)
    quota = there.tenants.quotas["acme"]
    flight = here.submit(prompt(1), 0.0)
    assert isinstance(flight, InFlight) and quota.refusal(0.0) is None
    there.peers.told("a", journal.take(), 0.01)
    assert quota.refusal(0.01) == ("concurrent", 1.0)
    assert (quota.peers_requests, quota.peers_tokens) == (1, 1_603 + 256)
    here.first_token(flight, 0.1)
    here.finished(flight, 0.2, Usage(1_603, 20_000, 0))
    there.peers.told("a", journal.take(), 0.21)
    assert quota.peers_in_flight == 0 and quota.peers_tokens == 21_603
    broken = quota.refusal(0.21)
    assert broken is not None and broken[0] == "tokens_per_s" and 0.9 < broken[1] < 1.0


def test_a_router_that_is_gone_leaves_its_slots_and_a_statement_repairs_them() -> None:
    limits = TenantLimits(concurrent=2)
    (here, journal), (there, _) = make_fleet("a", limits), make_fleet("b", limits)
    quota = there.tenants.quotas["acme"]
    flights = [here.submit(prompt(name), 0.0) for name in (1, 2)]
    there.peers.told("a", journal.take(), 0.0)
    assert quota.peers_in_flight == 2 and quota.peers_requests == 2
    assert isinstance(flights[0], InFlight)
    here.failed(flights[0], 0.1, Failure.CLOSED)
    journal.take()  # lost on the way
    outstanding, events = journal.statement(here.replicas, 0.2)
    there.peers.stated("a", outstanding, 0.2)
    there.peers.told("a", events, 0.2)
    assert quota.peers_in_flight == 1 and quota.peers_requests == 2, "nothing counts twice"
    there.peers.gone("a", 5.0)
    assert quota.peers_in_flight == 0


def test_a_failed_attempt_costs_no_tokens_and_its_retry_no_second_request() -> None:
    (here, journal), (there, _) = make_fleet("a", TenantLimits()), make_fleet("b", TenantLimits())
    quota = there.tenants.quotas["acme"]
    flight = here.submit(prompt(1), 0.0)
    assert isinstance(flight, InFlight)
    here.failed(flight, 0.1, Failure.CLOSED)
    again = here.sent(prompt(1), here.decide(prompt(1), 0.1, tried=(flight.decision.replica,)), 0.1)
    there.peers.told("a", journal.take(), 0.2)
    assert (quota.peers_requests, quota.peers_tokens, quota.peers_in_flight) == (1, 0, 1)
    here.cancelled(again, 0.3)
    there.peers.told("a", journal.take(), 0.3)
    assert (quota.peers_tokens, quota.peers_in_flight) == (0, 0)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), loss=st.sampled_from([0.0, 0.3]))
def test_whatever_happens_nothing_is_in_flight_in_the_end(seed: int, loss: float) -> None:
    rng = random.Random(seed)
    (here, journal), (there, _) = make_fleet("a", TenantLimits(), hold=True), make_fleet("b", TenantLimits())
    flights: list[InFlight] = []
    held: list[Held] = []
    quota = there.tenants.quotas["acme"]
    for step in range(60):
        now = step * 0.05
        choice = rng.random()
        if choice < 0.5:
            made = here.submit(prompt(step, rng.randint(1, 60)), now)
            (flights if isinstance(made, InFlight) else held).append(made)  # type: ignore[arg-type]
        elif flights:
            flight = flights.pop(rng.randrange(len(flights)))
            end = rng.randrange(4)
            if end == 0:
                here.failed(flight, now, Failure.CLOSED)
            elif end == 1:
                here.cancelled(flight, now)
            else:
                here.first_token(flight, now)
                here.finished(flight, now, Usage(100, 10, 0) if end == 2 else None)
        for one in here.outbox:
            held.remove(one)
            assert one.flight is not None
            flights.append(one.flight)
        here.outbox.clear()
        if held and rng.random() < 0.1:
            here.dropped(held.pop(rng.randrange(len(held))), now)
        events = journal.take()
        if rng.random() >= loss:
            there.peers.told("a", events, now)
        assert quota.peers_in_flight >= 0
        for replica in there.replicas:
            replica.held.check_invariants()
    outstanding, events = journal.statement(here.replicas, 9.0)
    there.peers.stated("a", outstanding, 9.0)
    there.peers.told("a", events, 9.0)
    assert quota.peers_in_flight == len(flights) + len(held) == there.peers.outstanding("a")
    there.peers.gone("a", 10.0)
    assert quota.peers_in_flight == 0 and all(not len(replica.held) for replica in there.replicas)


def test_what_is_believed_of_a_tenant_stays_within_its_share_wherever_it_was_learned() -> None:
    (here, journal), (there, _) = make_fleet("a", TenantLimits()), make_fleet("b", TenantLimits())
    third, _ = make_fleet("c", TenantLimits())
    for name in range(40):
        flight = here.submit(prompt(name, 50), name * 10.0)
        assert isinstance(flight, InFlight)
        here.finished(flight, name * 10.0 + 5.0, Usage(803, 1, 0))
        there.peers.told("a", journal.take(), name * 10.0)
    for chunk in written_down(here):
        taken_in(third, "", chunk, 500.0)
    for fleet in (here, there, third):
        held = [fleet.index.held_of(replica.index, "group g") for replica in fleet.replicas]
        assert held == [4_992, 4_992], "half of 10,000 tokens each, in whole blocks"
        fleet.index.check_invariants()
