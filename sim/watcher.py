"""What a simulated policy may hear of beside its questions: prompts, dispatches, ends, metrics.

The router's own policies see candidates and nothing else. Other routers' rules keep trees, counters and probe
results of their own; they are ``Watcher``s and hear of every event of the router they sit in.
"""

from collections.abc import Sequence
from copy import deepcopy
from typing import Self

from replica.contract.load_report import LoadReport
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState


class Watcher:
    """Hears nothing of interest; a policy overrides what it needs. Times are seconds."""

    metrics_every_s: float | None = None
    """How often it reads the replicas' metrics; ``None``: it does not."""

    def copy(self) -> Self:
        """An independent one in the same state."""
        return deepcopy(self)

    def arriving(self, prompt: Prompt) -> None:
        """``prompt`` is what the next question is about."""

    def sent(self, flight: InFlight, now: float) -> None:
        """A request was sent to ``flight.replica``."""

    def first_token(self, flight: InFlight, now: float) -> None:
        """Its first token came."""

    def over(self, flight: InFlight, now: float) -> None:
        """It ended, however it did."""

    def measured(
        self, replicas: Sequence[ReplicaState], reports: Sequence[LoadReport | None], now: float
    ) -> None:
        """Metrics were read: one report per replica, ``None`` from one that is down."""
