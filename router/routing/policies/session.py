"""A session stays on its home replica, unless that one carries more than its share."""

import random
from collections.abc import Sequence

from router.routing.decision import Assessment, Decision, Reason
from router.routing.policies.own_delay import decide_by_load
from router.routing.policies.predicted_finish import PredictedFinish
from router.routing.policies.rendezvous import DEFAULT_BOUND, home
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest


class Session:
    """Promise: requests with one ``x-session-id`` go to one replica while it carries at most 1.25 x the mean.

    A request without a session, or with an empty one, is routed by predicted finish: a missing key is not
    one big session.
    """

    samples = False

    def __init__(self, rng: random.Random, bound: float = DEFAULT_BOUND) -> None:
        self._bound = bound
        self._without = PredictedFinish(rng)

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The session's home, or the next in its order when home is over its bound."""
        if not request.session:
            return self._without.choose(request, candidates)
        chosen, first = home(request.session.encode("utf-8", "surrogatepass"), candidates, self._bound)
        return decide_by_load(request, chosen).because(Reason.SESSION if first else Reason.SPILL)

    def copy(self) -> "Session":
        """An independent one in the same state."""
        twin = Session(random.Random(), self._bound)
        twin._without = self._without.copy()
        return twin

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """What predicted finish would make of it, for information."""
        return self._without.assess(request, candidates)
