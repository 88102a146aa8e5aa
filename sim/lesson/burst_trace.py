"""The burst: two replicas have just forgotten sixteen sessions, two fresh ones join, everybody comes back.

::

    0 s          16 sessions of 12,288 tokens, 8 on each of replicas 0 and 1; a hot prefix of 8,192 on both
    30 - 94 s    32 documents of 20,480 tokens: with 300,000 tokens of KV per replica they push the sessions
                 out, and the hot prefix on replica 1; on replica 0 it is asked for meanwhile and stays
    155 s        replicas 2 and 3 join
    160 - 163 s  the burst: the 16 sessions and 32 requests with the hot prefix, in random order

The stale holders are a minority of the fleet: were they spread evenly over it, a wrong belief would act like
hashing and the fault would not show.
"""

import random
from dataclasses import dataclass

from sim.fleet_change import FleetChange
from sim.simulated_replica import ReplicaSettings
from sim.workload.arrivals import Arrival
from sim.workload.trace import Trace, TraceRequest

BLOCK_TOKENS = 512
REPLICAS = 4
OLD_HOLDERS = 2
CAPACITY_TOKENS = 300_000
SESSIONS, SESSION_TOKENS = 16, 12_288
HOT_REQUESTS, HOT_TOKENS = 32, 8_192
DOCUMENTS, DOCUMENT_TOKENS = 32, 20_480
OWN_TOKENS = 1_000
"""What each request of the burst adds to what was there."""
ANSWER_TOKENS = 130
BURST_FROM_S, BURST_S = 160.0, 3.0
JOIN_S = 155.0


@dataclass(frozen=True, slots=True)
class Burst:
    """The requests in order of arrival; the burst is the last ``burst`` of them."""

    trace: Trace
    plan: tuple[Arrival, ...]
    burst: int

    @property
    def changes(self) -> tuple[FleetChange, ...]:
        """The fresh replicas join."""
        return tuple(FleetChange(JOIN_S, "join", replica) for replica in range(OLD_HOLDERS, REPLICAS))

    @property
    def replica(self) -> ReplicaSettings:
        """A replica of the fleet."""
        return ReplicaSettings(capacity_tokens=CAPACITY_TOKENS, shares_prefills=False)

    def kind(self, position: int) -> str:
        """What a request is, for people."""
        return self.plan[position].request.session or "document"


def make_burst(seed: int) -> Burst:
    """Everything is the same for every seed but the order and the times within the burst."""
    rng = random.Random(f"burst {seed}")
    ids = iter(range(1, 1 << 40))

    def fresh(tokens: int) -> tuple[int, ...]:
        return tuple(next(ids) for _ in range(tokens // BLOCK_TOKENS))

    sessions = [fresh(SESSION_TOKENS) for _ in range(SESSIONS)]
    hot = fresh(HOT_TOKENS)
    rows: list[tuple[float, str, tuple[int, ...], int]] = []
    for number, blocks in enumerate(sessions):
        rows.append((1.0 * number, f"session {number}", blocks, SESSION_TOKENS + 100))
    for number in range(OLD_HOLDERS):
        rows.append((20.0 + 2.0 * number, "hot prefix", hot, HOT_TOKENS + 100))
    for number in range(DOCUMENTS):
        rows.append((30.0 + 2.0 * number, "document", fresh(DOCUMENT_TOKENS), DOCUMENT_TOKENS + 100))
        if number % 8 >= 6:  # requests take turns, so all of these meet on replica 0
            rows.append((31.0 + 2.0 * number, "hot prefix", hot, HOT_TOKENS + 100))
    before = len(rows)
    burst = [(f"session {number}", blocks, SESSION_TOKENS) for number, blocks in enumerate(sessions)]
    burst += [("hot prefix", hot, HOT_TOKENS)] * HOT_REQUESTS
    rng.shuffle(burst)
    times = sorted(BURST_FROM_S + BURST_S * rng.random() for _ in burst)
    for time_s, (name, blocks, tokens) in zip(times, burst, strict=True):
        own = OWN_TOKENS + rng.randrange(-200, 201)
        named = blocks + fresh((tokens + own) - len(blocks) * BLOCK_TOKENS)
        rows.append((time_s, name, named, tokens + own))
    rows.sort(key=lambda row: row[0])
    requests = tuple(
        TraceRequest(tokens, ANSWER_TOKENS, blocks, timestamp_ms=1e3 * time_s, session=name)
        for time_s, name, blocks, tokens in rows
    )
    plan = tuple(Arrival(request, (request.timestamp_ms or 0.0) / 1e3) for request in requests)
    assert len(plan) == before + len(burst)
    return Burst(Trace("burst", BLOCK_TOKENS, requests), plan, len(burst))
