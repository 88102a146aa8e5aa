"""A simulated router that sends every request where a live one sent it.

A policy that looks at times is chaotic: one late answer moves a prefix to another replica, and the cached
share of two live runs of one trace differs by points. What is left once the choices are the same is no
chance: it is what the simulated caches do otherwise than the real ones.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from router.routing.decision import Assessment, Decision
from router.routing.policies.own_delay import assess_own_delay, decide_by_load
from router.routing.replica_state import ReplicaState
from router.routing.view import RoutingRequest
from sim.contender import Contender
from sim.outcome import Outcome
from sim.results import Result
from sim.simulate import result_of, run_once
from sim.simulation_settings import SimulationSettings
from sim.workload.arrivals import plan_arrivals
from sim.workload.trace import Trace

FOLLOWED = "followed"


class _Followed:
    """Promise: the choices given, one after the other."""

    samples = False

    def __init__(self, choices: Iterator[int]) -> None:
        self._choices = choices

    def choose(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> Decision:
        """The next of the choices."""
        choice = next(self._choices)
        return decide_by_load(request, next(one for one in candidates if one.index == choice))

    def copy(self) -> "_Followed":
        """Itself: there is one row of choices."""
        return self

    def assess(self, request: RoutingRequest, candidates: Sequence[ReplicaState]) -> list[Assessment]:
        """Wait and prefill on every candidate."""
        return assess_own_delay(request, candidates)


def followed(
    trace: Trace, live: Sequence[Outcome], replicas: int, settings: SimulationSettings, seed: int
) -> Result | None:
    """``trace``, timed, sent when and where ``live`` was (outcomes by position in the plan of arrivals).

    ``None`` where it is not known of every request who answered it.
    """
    plan = tuple(
        replace(arrival, at_s=outcome.sent_s)
        for arrival, outcome in zip(plan_arrivals(trace, seed=seed), live, strict=True)
    )
    in_order = sorted(live, key=lambda outcome: outcome.sent_s)
    choices = [outcome.replica for outcome in in_order if outcome.replica is not None]
    if len(choices) < len(live):
        return None
    contender = Contender(FOLLOWED, lambda rng: _Followed(iter(choices)))
    outcomes = run_once(trace, plan, contender, replicas, seed, settings)
    return result_of(FOLLOWED, trace, plan, outcomes, replicas, settings)
