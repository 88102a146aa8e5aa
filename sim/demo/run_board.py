"""What the demo knows while it runs: one owner for the figures that the views show."""

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from sim.demo.play_script import RequestRecord

RECENT = 12


@dataclass(slots=True)
class ReplicaBoard:
    """One replica: the router's view of it (``/fleet``) and what clients got from it."""

    queued: int = 0
    decoding: int = 0
    wait_ms: float = 0.0
    index_tokens: int = 0
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def hit_share(self) -> float:
        """Cached tokens over prompt tokens so far."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0


@dataclass(slots=True)
class RunBoard:
    """One policy's run so far. Only ``request_done`` and ``fleet_seen`` change it."""

    policy: str
    total_requests: int
    prefill_s_per_token: float
    replicas: dict[str, ReplicaBoard]
    done: int = 0
    errors: int = 0
    spills: int = 0
    elapsed_s: float = 0.0
    recent: deque[RequestRecord] = field(default_factory=lambda: deque(maxlen=RECENT))

    def request_done(self, record: RequestRecord) -> None:
        """A request was answered, or failed."""
        self.done += 1
        self.elapsed_s = max(self.elapsed_s, record.sent_at_s + record.answer.e2e_s)
        self.recent.append(record)
        answer = record.answer
        if answer.error is not None:
            self.errors += 1
            return
        self.spills += answer.reason == "spill"
        if answer.replica in self.replicas:
            replica = self.replicas[answer.replica]
            replica.requests += 1
            replica.prompt_tokens += answer.prompt_tokens or 0
            replica.cached_tokens += answer.cached_tokens or 0

    def fleet_seen(self, fleet: dict[str, Any], elapsed_s: float) -> None:
        """The router's ``/fleet``, read ``elapsed_s`` after the run's start."""
        self.elapsed_s = max(self.elapsed_s, elapsed_s)
        for state in fleet["replicas"]:
            replica = self.replicas.get(state["name"])
            if replica is None:
                continue
            replica.queued = state["queued"]
            replica.decoding = state["decoding"]
            replica.wait_ms = state["wait_ms"]
            replica.index_tokens = state["index"]["tokens"]

    def saved_ms(self, tokens: int) -> float:
        """Prefill milliseconds that ``tokens`` cached tokens save on an idle replica."""
        return tokens * self.prefill_s_per_token * 1_000.0

    @property
    def hit_share(self) -> float:
        """Cached tokens over prompt tokens of the whole fleet so far."""
        prompt = sum(replica.prompt_tokens for replica in self.replicas.values())
        return sum(r.cached_tokens for r in self.replicas.values()) / prompt if prompt else 0.0

    @property
    def total_saved_ms(self) -> float:
        """Prefill milliseconds saved so far."""
        return self.saved_ms(sum(replica.cached_tokens for replica in self.replicas.values()))
