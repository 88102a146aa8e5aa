"""Routers that share their state, an overloaded fleet, three tenants: shares by weight, no replica idle."""

import random
from collections.abc import Callable
from heapq import heappop, heappush
from itertools import count

import pytest

from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight, Usage
from router.routing.journal import Journal
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.quota import TenantLimits
from router.routing.replica_state import ReplicaSpec
from router.routing.tenant import Tenant

BLOCK, REPLICAS = 16, 2
SECONDS, TICK_S, FLUSH_S, LAG_S = 20.0, 0.01, 0.005, 0.006
TENANTS = {
    name: Tenant(name, weight=weight) for name, weight in (("short", 1.0), ("two", 2.0), ("long", 1.0))
}
PROMPTS = {"short": (6, 200, 1_500), "two": (3, 500, 4_000), "long": (1, 2_000, 8_000)}
"""Part of the requests, least and most tokens: each tenant asks for more than its share."""
ARRIVALS_PER_S = 30.0


class Site:
    """Engines that prefill one prompt after the other, and routers under a virtual clock."""

    def __init__(self, routers: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleets = [self._fleet(str(number)) for number in range(routers)]
        self.free = [0.0] * REPLICAS
        self.busy_s = 0.0
        """Until ``SECONDS``."""
        self.served = dict.fromkeys(TENANTS, 0)
        """Tokens, from a quarter of the time until ``SECONDS``."""
        self.left = 0
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._number = count()

    @staticmethod
    def _fleet(name: str) -> Fleet:
        fleet = Fleet(
            [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(REPLICAS)],
            POLICIES["predicted_finish"](random.Random(1)),
            FleetSettings(hold=True),
            layout=UniformLayout(BLOCK),
            tokens_per_unit=1.0,
        )
        for replica in range(REPLICAS):
            fleet.probe_succeeded(replica, 0.0)
        fleet.tenants.applied([(tenant, TenantLimits()) for tenant in TENANTS.values()])
        fleet.journal = Journal(name, fleet.caches.exact)
        return fleet

    def at(self, time_s: float, what: Callable[[float], None]) -> None:
        heappush(self._events, (time_s, next(self._number), what))

    def run(self) -> None:
        """Until everybody was served."""
        now, parts = 0.0, [part for part, _, _ in PROMPTS.values()]
        while now < SECONDS:
            now += self.rng.expovariate(ARRIVALS_PER_S)
            (name,) = self.rng.choices(list(PROMPTS), parts)
            tokens = self.rng.randint(*PROMPTS[name][1:])
            self.at(now, lambda at, name=name, tokens=tokens: self.arrived(at, name, tokens))  # type: ignore[misc]
            self.left += 1
        self.at(TICK_S, self.ticked)
        self.at(FLUSH_S, self.flushed)
        while self._events:
            now, _, what = heappop(self._events)
            assert now < 10 * SECONDS, "somebody is never served"
            what(now)

    def arrived(self, now: float, name: str, tokens: int) -> None:
        fleet = self.rng.choice(self.fleets)
        first = next(self._number) << 20
        prompt = Prompt(
            keys=range(first, first + tokens // BLOCK), units=tokens, layout=UniformLayout(BLOCK), stream=True
        )
        prompt.tenant = TENANTS[name]
        outcome = fleet.submit(prompt, now)
        if isinstance(outcome, InFlight):
            self.sent(fleet, outcome, now)
        self.released(fleet, now)

    def released(self, fleet: Fleet, now: float) -> None:
        for held in fleet.outbox:
            assert held.flight is not None
            self.sent(fleet, held.flight, now)
        fleet.outbox.clear()

    def sent(self, fleet: Fleet, flight: InFlight, now: float) -> None:
        replica, tokens = flight.decision.replica, flight.prompt.units
        begin = max(now, self.free[replica])
        end = self.free[replica] = begin + 0.004 + 62.5e-6 * tokens
        self.busy_s += max(0.0, min(SECONDS, end) - begin)
        assert flight.prompt.tenant is not None
        if SECONDS / 4 < end < SECONDS:
            self.served[flight.prompt.tenant.name] += tokens
        self.at(end, lambda at: self.finished(fleet, flight, at))

    def finished(self, fleet: Fleet, flight: InFlight, now: float) -> None:
        fleet.first_token(flight, now)
        fleet.finished(flight, now, Usage(flight.prompt.units, 1, 0))
        self.released(fleet, now)
        self.left -= 1

    def ticked(self, now: float) -> None:
        for fleet in self.fleets:
            fleet.tick(now)
            self.released(fleet, now)
        if self.left:
            self.at(now + TICK_S, self.ticked)

    def flushed(self, now: float) -> None:
        for fleet in self.fleets:
            assert fleet.journal is not None
            router, news = fleet.journal.router, fleet.journal.take()
            for other in self.fleets:
                if other is not fleet and news:
                    self.at(now + LAG_S, lambda at, o=other, r=router, n=news: self.heard(o, r, n, at))  # type: ignore[misc]
        if self.left:
            self.at(now + FLUSH_S, self.flushed)

    def heard(self, fleet: Fleet, router: str, news: list, now: float) -> None:  # type: ignore[type-arg]
        fleet.peers.told(router, news, now)
        self.released(fleet, now)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize(("routers", "busy"), [(1, 0.98), (2, 0.93)])
def test_shares_are_by_weight_and_replicas_are_kept_busy(routers: int, busy: float, seed: int) -> None:
    site = Site(routers, seed)
    site.run()
    assert site.busy_s / SECONDS / REPLICAS > busy
    assert max(site.free) - min(site.free) < 1.5, "within three of the longest prompts, also when it ends"
    whole = sum(site.served.values())
    assert {name: pytest.approx(tokens / whole, abs=0.05) for name, tokens in site.served.items()} == {
        "short": 0.25,
        "two": 0.5,
        "long": 0.25,
    }
    for fleet in site.fleets:
        assert fleet.held == 0 and not any(len(replica.held) for replica in fleet.replicas)
