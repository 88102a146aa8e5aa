"""How loaded a candidate is, by one of several measures; how to choose among loads is the policies' idea."""

from router.routing.replica_state import ReplicaState


def in_flight(candidate: ReplicaState, now: float) -> float:
    """Requests sent and not over, per unit of weight."""
    return (candidate.ledger.queued + candidate.ledger.decoding) / candidate.weight


def outstanding_tokens(candidate: ReplicaState, now: float) -> float:
    """Uncached prompt tokens and expected reply tokens in flight, per unit of weight."""
    return candidate.ledger.outstanding_tokens / candidate.weight


def wait(candidate: ReplicaState, now: float) -> float:
    """Seconds of prefill backlog."""
    return candidate.ledger.backlog_s(now)


LOAD_MEASURES = {"in_flight": in_flight, "outstanding_tokens": outstanding_tokens, "wait": wait}
