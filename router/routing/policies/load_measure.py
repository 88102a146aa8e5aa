"""How loaded a candidate is, by one of several measures; how to choose among loads is the policies' idea."""

from typing import Final

from router.routing.replica_state import ReplicaState

IDLE_SHARE: Final = 4
"""The mean of outstanding tokens over this is next to nothing."""


def idle_below(outstanding: int, replicas: int) -> float:
    """With fewer, one of ``replicas`` that have ``outstanding`` tokens in all has next to nothing to do."""
    return outstanding / (IDLE_SHARE * replicas)


def in_flight(candidate: ReplicaState, now: float) -> float:
    """Requests sent and not over or waiting for it, per unit of weight."""
    return candidate.assigned / candidate.weight


def outstanding_tokens(candidate: ReplicaState, now: float) -> float:
    """Uncached prompt tokens and expected reply tokens, per unit of weight."""
    return candidate.outstanding_tokens / candidate.weight


def wait(candidate: ReplicaState, now: float) -> float:
    """Seconds of prefill backlog, of requests that wait in the router, too."""
    return candidate.ledger.backlog_s(now) + candidate.held.prefill_s


LOAD_MEASURES = {"in_flight": in_flight, "outstanding_tokens": outstanding_tokens, "wait": wait}
