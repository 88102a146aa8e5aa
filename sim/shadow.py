"""One policy decides, another is asked the same: where would they part, request by request?

Two policies' runs drift apart after their first different choice, so comparing their decisions afterwards
compares nothing. Here the *second* policy is shown the very state in which the first decides, every time, and
never has its way.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from heapq import heappush, heappushpop

from replica.contract.load_report import LoadReport
from router.routing.decision import Assessment, Decision
from router.routing.in_flight import InFlight
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.view import Policy, RoutingRequest
from sim.watcher import Watcher


@dataclass(slots=True)
class Difference:
    """One request that the two would have sent to different replicas."""

    number: int
    """Which decision it was, from 1."""
    now: float
    prompt_tokens: int
    chosen: Decision
    other: Decision
    rows: list[Assessment]
    """What each candidate would cost, as the policy that decides has it."""
    other_scores: dict[int, float]
    """By replica: the other's own score; empty if it has none."""
    flight: InFlight | None = field(default=None)
    """What became of it."""

    def row(self, replica: int) -> Assessment:
        """The deciding policy's row of a candidate."""
        return next(row for row in self.rows if row.replica == replica)

    @property
    def given_up(self) -> float:
        """How much more the other's choice costs by the deciding policy's figures."""
        return self.row(self.other.replica).total_s - self.row(self.chosen.replica).total_s


class Shadow(Watcher):
    """``policy`` decides, ``shadow`` is asked; keeps the ``most`` differences that ``policy`` minds most."""

    def __init__(self, policy: Policy, shadow: Policy, most: int, from_s: float = 0.0) -> None:
        """Differences before ``from_s`` are counted and not kept: caches are cold there."""
        self.samples = policy.samples and shadow.samples
        self._policy = policy
        self._shadow = shadow
        self._watchers = [one for one in (policy, shadow) if isinstance(one, Watcher)]
        intervals = [w.metrics_every_s for w in self._watchers if w.metrics_every_s is not None]
        self.metrics_every_s = min(intervals, default=None)
        self._most = most
        self._from_s = from_s
        self._kept: list[tuple[float, int, Difference]] = []
        self._prompt: Prompt | None = None
        self._open: dict[int, Difference] = {}
        self.decisions = 0
        self.different = 0

    @property
    def differences(self) -> list[Difference]:
        """The differences kept, in order of time."""
        return sorted((kept for _, _, kept in self._kept), key=lambda kept: kept.number)

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The policy's choice."""
        chosen = self._policy.choose(request, candidates)
        other = self._shadow.choose(request, candidates)
        self.decisions += 1
        if other.replica != chosen.replica:
            self.different += 1
            if request.now >= self._from_s and self._most:
                self._keep(request, candidates, chosen, other)
        return chosen

    def _keep(
        self, request: RoutingRequest, candidates: Sequence[ReplicaState], chosen: Decision, other: Decision
    ) -> None:
        scores = {}
        if getattr(self._shadow, "scored", True):
            scores = {row.replica: row.total_s for row in self._shadow.assess(request, candidates)}
        made = Difference(
            self.decisions,
            request.now,
            request.prompt_tokens,
            chosen,
            other,
            self._policy.assess(request, candidates),
            scores,
        )
        entry = (made.given_up, self.decisions, made)
        if len(self._kept) < self._most:
            heappush(self._kept, entry)
        else:
            heappushpop(self._kept, entry)
        if self._prompt is not None:
            self._open[id(self._prompt)] = made

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """The policy's rows."""
        return self._policy.assess(request, candidates)

    def arriving(self, prompt: Prompt) -> None:
        """Both are told."""
        self._prompt = prompt
        for watcher in self._watchers:
            watcher.arriving(prompt)

    def sent(self, flight: InFlight, now: float) -> None:
        """Both are told where it really went."""
        difference = self._open.pop(id(flight.prompt), None)
        if difference is not None:
            difference.flight = flight
        for watcher in self._watchers:
            watcher.sent(flight, now)

    def first_token(self, flight: InFlight, now: float) -> None:
        """Both are told."""
        for watcher in self._watchers:
            watcher.first_token(flight, now)

    def over(self, flight: InFlight, now: float) -> None:
        """Both are told."""
        for watcher in self._watchers:
            watcher.over(flight, now)

    def measured(
        self, replicas: Sequence[ReplicaState], reports: Sequence[LoadReport | None], now: float
    ) -> None:
        """Both are told."""
        for watcher in self._watchers:
            watcher.measured(replicas, reports, now)
