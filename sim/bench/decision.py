"""What a decision costs in CPU, by size of prompt and of fleet: the router's own code, without sockets.

Replicas are imaginary: one prefill after the other of ``PREFILL_S``, then ``REPLY_S`` of decoding, under a
virtual clock. Two loads: ``busy``, half of what the fleet can prefill; ``full``, with ``WAITING`` requests a
replica held in the router, so that each that comes is put in order and each first token lets one go.
"""

import gc
import heapq
import random
import time
from collections.abc import Callable
from dataclasses import dataclass

from router.routing.fleet import Fleet
from router.routing.fleet_settings import FleetSettings
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.policies import POLICIES
from router.routing.prompt_blocks import read_prompt
from router.routing.replica_state import ReplicaSpec
from sim.bench.prompts import conversation_body

PREFILL_S = 0.05
REPLY_S = 1.0
BUSY_SHARE = 0.5
WAITING = 1
"""Per replica, in the full fleet."""
BYTES_PER_TOKEN = 4
REPLY_TOKENS = 100
LOADS = ("busy", "full")
TICK_S = 0.05


@dataclass(frozen=True, slots=True)
class DecisionCost:
    """Of one request, means, microseconds of CPU."""

    read_us: float
    """From the body to the prompt's keys."""
    choose_us: float
    """From there until it is booked on a replica or held."""
    later_us: float
    """Its first token and its end: what is learned of them, and who goes next."""

    @property
    def decision_us(self) -> float:
        """What stands between a whole request and its replica."""
        return self.read_us + self.choose_us

    @property
    def all_us(self) -> float:
        """All of it."""
        return self.decision_us + self.later_us


class _Replay:
    """One fleet under one load."""

    def __init__(self, replicas: int, load: str, seed: int) -> None:
        self._chance = random.Random(seed)
        policy = POLICIES["predicted_finish"](random.Random(seed))
        specs = [ReplicaSpec(f"r{n}", f"http://10.0.{n // 250}.{n % 250 + 1}") for n in range(replicas)]
        self._fleet = Fleet(specs, policy, FleetSettings(hold=True))
        for replica in self._fleet.replicas:
            self._fleet.probe_succeeded(replica.index, 0.0)
        self._free_at = [0.0] * replicas
        self._events: list[tuple[float, int, bool, InFlight]] = []
        self._numbers = 0
        self._now = self._ticked = 0.0
        self._gap_s = PREFILL_S / (BUSY_SHARE * replicas)
        self._most_held = WAITING * replicas if load == "full" else None
        self.spent_ns = [0, 0, 0]

    def ask(self, body: bytes) -> None:
        """One request comes, after all that happens before."""
        if self._most_held is None:
            until = self._now + self._chance.expovariate(1.0 / self._gap_s)
            while self._events and self._events[0][0] <= until:
                self._next_event()
            self._now = until
        else:
            while self._fleet.held >= self._most_held and self._events:
                self._next_event()
        began = time.thread_time_ns()
        prompt = read_prompt(body)
        read = time.thread_time_ns()
        outcome = self._fleet.submit(prompt, self._now)
        chosen = time.thread_time_ns()
        self.spent_ns[0] += read - began
        self.spent_ns[1] += chosen - read
        if not isinstance(outcome, Held):
            self._sent(outcome)
        self._release()

    def _next_event(self) -> None:
        self._now, _, first, flight = heapq.heappop(self._events)
        if self._now > self._ticked + TICK_S:
            self._ticked = self._now
            self._fleet.tick(self._now)
        tokens = flight.prompt.units // BYTES_PER_TOKEN
        usage = Usage(tokens, REPLY_TOKENS, min(flight.decision.matched_tokens, tokens))
        began = time.thread_time_ns()
        if first:
            self._fleet.first_token(flight, self._now)
        else:
            self._fleet.finished(flight, self._now, usage)
        self.spent_ns[2] += time.thread_time_ns() - began
        if first:
            self._put(self._now + REPLY_S, False, flight)
        self._release()

    def _sent(self, flight: InFlight) -> None:
        at = flight.replica.index
        self._free_at[at] = max(self._free_at[at], self._now) + PREFILL_S
        self._put(self._free_at[at], True, flight)

    def _put(self, at: float, first: bool, flight: InFlight) -> None:
        self._numbers += 1
        heapq.heappush(self._events, (at, self._numbers, first, flight))

    def _release(self) -> None:
        outbox = self._fleet.outbox
        while outbox:
            held = outbox.pop(0)
            assert held.flight is not None
            self._sent(held.flight)


def decision_cost(replicas: int, size_kib: int, load: str, requests: int, seed: int = 1) -> DecisionCost:
    """Of ``requests`` conversations of ``size_kib`` KiB, once the fleet is as loaded as it will be.

    ``load``: one of ``LOADS``.
    """
    replay = _Replay(replicas, load, seed)
    chance = random.Random(seed)
    # Until streams are as many as will be at a time, and the index has met every first message.
    warm_up = int(replicas * REPLY_S / PREFILL_S) + 400
    for number in range(warm_up):
        replay.ask(conversation_body(chance, number, size_kib))
    gc.collect()
    gc.freeze()
    replay.spent_ns = [0, 0, 0]
    for number in range(warm_up, warm_up + requests):
        replay.ask(conversation_body(chance, number, size_kib))
    gc.unfreeze()
    read, choose, later = (spent / requests / 1e3 for spent in replay.spent_ns)
    return DecisionCost(read, choose, later)


Measured = dict[tuple[str, int, int], list[DecisionCost]]
"""By load, KiB and replicas: a round each."""


def measure_decisions(
    fleets: tuple[int, ...],
    sizes_kib: tuple[int, ...],
    requests: int,
    rounds: int,
    progress: Callable[[str, int, int], None],
) -> Measured:
    """Every load, size and fleet in turn, ``rounds`` times."""
    measured: Measured = {}
    steps = [(load, size, fleet) for load in LOADS for size in sizes_kib for fleet in fleets]
    for number in range(rounds):
        for at, (load, size, fleet) in enumerate(steps):
            progress("decisions", number * len(steps) + at, rounds * len(steps))
            cost = decision_cost(fleet, size, load, requests, seed=number + 1)
            measured.setdefault((load, size, fleet), []).append(cost)
    return measured
