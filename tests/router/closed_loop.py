"""Users in a closed loop against a fleet under a virtual clock: enough of replicas to load a policy with.

A replica prefills one request after the other at its real cost, keeps what it has computed, and decodes
any number side by side. The simulator (``sim/``) is the faithful one; this one is small and looks inside.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count

from replica.contract.prefill_cost import PrefillCost
from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.in_flight import InFlight, Usage
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import Prompt, UniformLayout
from router.routing.replica_state import ReplicaSpec

BLOCK = 16
COST = PrefillCost(fixed_s=0.004, per_token_s=31e-6)


def make_fleet(replicas: int, kind: str = "predicted_finish") -> Fleet:
    """A fleet of healthy replicas whose prompts are token blocks."""
    fleet = Fleet(
        [ReplicaSpec(f"r{index}", f"http://r{index}") for index in range(replicas)],
        POLICIES[kind](random.Random(1)),
        FleetSettings(),
        rng=random.Random(2),
        layout=UniformLayout(BLOCK),
        tokens_per_unit=1.0,
    )
    for replica in range(replicas):
        fleet.probe_succeeded(replica, 0.0)
    return fleet


def prompt(*runs: tuple[str, int], stream: bool = True) -> Prompt:
    """A prompt made of named runs of tokens: ``("system", 1_000), ("user 7", 60)``. Whole blocks."""
    keys, parent = [], "root"
    for name, tokens in runs:
        for block in range(tokens // BLOCK):
            parent = f"{hash((parent, name, block))}"
            keys.append(int(parent) & 0xFFFF_FFFF_FFFF_FFFF)
    return Prompt(keys=keys, units=len(keys) * BLOCK + 1, layout=UniformLayout(BLOCK), stream=stream)


@dataclass
class Replica:
    """What one replica has computed and when it is free."""

    free_at: float = 0.0
    computed: set[int] = field(default_factory=set)
    work_s: float = 0.0


class ClosedLoop:
    """Sends requests to ``fleet`` and lets time pass until they are answered."""

    def __init__(self, fleet: Fleet, *, decode_s: float = 0.5) -> None:
        self.fleet = fleet
        self.now = 0.0
        self.decode_s = decode_s
        self.replicas = [Replica() for _ in fleet.replicas]
        self.sent = Counter[int]()
        """Requests by replica."""
        self._events: list[tuple[float, int, str, InFlight, object]] = []
        self._order = count()

    def send(self, asked: Prompt, tag: object = None) -> int:
        """Route a request now; the replica it goes to."""
        decision = self.fleet.decide(asked, self.now)
        flight = self.fleet.sent(asked, decision, self.now)
        while len(self.replicas) <= decision.replica:
            self.replicas.append(Replica())
        replica = self.replicas[decision.replica]
        cached = 0
        while cached < len(asked.keys) and asked.keys[cached] in replica.computed:
            cached += 1
        replica.computed.update(asked.keys)
        seconds = COST.seconds(asked.units - cached * BLOCK, cached * BLOCK)
        replica.free_at = max(self.now, replica.free_at) + seconds
        replica.work_s += seconds
        self.sent[decision.replica] += 1
        usage = Usage(asked.units, 50, cached * BLOCK)
        heappush(self._events, (replica.free_at, next(self._order), "token", flight, (tag, usage)))
        return decision.replica

    def answers(self) -> Iterator[object]:
        """Let time pass; yields the tag of each request as its answer ends. Send more meanwhile."""
        while self._events:
            self.now, _, what, flight, (tag, usage) = heappop(self._events)  # type: ignore[misc]
            if what == "token":
                self.fleet.first_token(flight, self.now)
                ends = self.now + self.decode_s
                heappush(self._events, (ends, next(self._order), "end", flight, (tag, usage)))
            else:
                self.fleet.finished(flight, self.now, usage)
                yield tag

    def drain(self) -> None:
        """Let everything be answered."""
        for _ in self.answers():
            pass


def max_over_mean(counts: Counter[int], replicas: int) -> float:
    """The busiest replica's share over an even one."""
    return max(counts.values()) * replicas / sum(counts.values())
