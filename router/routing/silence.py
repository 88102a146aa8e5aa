"""Finds replicas that answer HTTP and produce nothing: by requests that wait much longer than predicted.

Probes do not see it: an engine's loop can hang behind a server that still answers. A long prefill is no
silence, for it was predicted to be long.
"""

from typing import Final

from router.routing.fleet_speed import FleetSpeed
from router.routing.in_flight import InFlight
from router.routing.kv_route import Step
from router.routing.roster import Roster
from router.routing.traffic import Traffic

LEARNED_FROM: Final = 20
"""Lessons that the fleet's replicas must have taught: before, predictions are a guess."""
LONGEST_REPLY: Final = 10.0
"""Where a request sets no limit, its reply may be so many times as long as the mean."""


class Silence:
    """Owned by the fleet's ``Availability``. Asks, changes nothing."""

    __slots__ = ("_replicas", "_speed", "_traffic")

    def __init__(self, replicas: Roster, speed: FleetSpeed, traffic: Traffic) -> None:
        self._replicas = replicas
        self._speed = speed
        self._traffic = traffic

    def shown_by(self, flight: InFlight, now: float) -> bool:
        """Whether its replica is silent, by ``flight``, which has no byte of content yet.

        For longer than ``health.silent_after_s`` and ``silent_factor`` times what was predicted for the
        request, the replica produced nothing for anybody, though it has this to do, and others did.
        """
        replica = flight.replica
        health, settings = replica.health, replica.health.settings
        since = max(flight.sent_at, replica.progress_at)
        silent_s = now - since
        if settings.silent_after_s is None or silent_s <= settings.silent_after_s:
            return False
        if health.silent_at is not None and flight.sent_at <= health.silent_at:
            return False  # known by that, and left alone
        if not flight.timed or not flight.prompt.units:
            return False  # it waits for another replica, or nobody knows for what
        if silent_s <= settings.silent_factor * self._predicted_s(flight):
            return False
        others = any(one.serving and one.progress_at > since for one in self._replicas if one is not replica)
        return others and self._speed.learned.prefills >= LEARNED_FROM

    def _predicted_s(self, flight: InFlight) -> float:
        """Until the first byte: the last one, where it is not streamed."""
        decision, prompt, replica = flight.decision, flight.prompt, flight.replica
        first_token_s = decision.wait_s + decision.prefill_s
        if prompt.stream or (decision.route is not None and decision.route.step is Step.PREFILL):
            return first_token_s
        tokens = prompt.max_tokens or LONGEST_REPLY * self._traffic.output_tokens
        return first_token_s + tokens * replica.cost.step_s(replica.ledger.in_flight)
