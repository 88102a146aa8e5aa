"""Who gets work: what probes, requests and operators say of a replica, and what follows for those waiting."""

from router.routing.cache_beliefs import CacheBeliefs
from router.routing.health import HealthState
from router.routing.holding import Holding
from router.routing.in_flight import InFlight
from router.routing.journal import Journal
from router.routing.replica_state import ReplicaState
from router.routing.retry import Failure
from router.routing.roster import Roster
from router.routing.silence import Silence

_BLAMELESS = (Failure.BUSY, Failure.SILENT, Failure.NO_SOCKET)
"""Busy is not broken, silence was told by probes, and what this router lacks says nothing of the replica."""


class Availability:
    """Owned by the fleet. Moves ``health`` and ``draining``; the roster and the holding hear of it."""

    __slots__ = ("_caches", "_holding", "_replicas", "_resting", "_silence", "journal")

    def __init__(self, replicas: Roster, caches: CacheBeliefs, holding: Holding, silence: Silence) -> None:
        self._replicas = replicas
        self._caches = caches
        self._holding = holding
        self._silence = silence
        self._resting: list[ReplicaState] = []
        self.journal: Journal | None = None

    def request_succeeded(self, replica: ReplicaState) -> None:
        """It answered a request, if only to refuse it."""
        health = replica.health
        if health.state is not HealthState.HEALTHY:
            if health.silent_at is not None and replica.progress_at <= health.silent_at:
                return  # what its server refuses does not show that the engine works
            self._replicas.changed()
        health.request_succeeded()

    def request_failed(
        self, replica: ReplicaState, now: float, failure: Failure, rest_s: float = 0.0
    ) -> None:
        """A request failed there by the replica's fault; see ``Fleet.failed``."""
        if failure is Failure.BUSY and rest_s > 0.0:
            if not replica.resting:
                self._resting.append(replica)
            replica.rests_until = max(replica.rests_until, now + rest_s)
        before = replica.health.state
        if failure is Failure.CONNECT:
            replica.health.connect_failed(now)
            self._caches.unreachable(replica.index)
        elif failure not in _BLAMELESS:
            replica.health.request_failed(now)
        self._may_be_ejected(replica, before, now)

    def still_waits(self, flight: InFlight, now: float) -> bool:
        """See ``Fleet.still_waits``."""
        replica = flight.replica
        before = replica.health.state
        if before is HealthState.EJECTED or not self._silence.shown_by(flight, now):
            return False
        replica.health.found_silent(now)
        self._may_be_ejected(replica, before, now)
        return True

    def rested(self, now: float) -> None:
        """See ``Fleet.rested``."""
        for replica in [one for one in self._resting if now >= one.rests_until]:
            self._resting.remove(replica)
            replica.rests_until = 0.0
            if replica in self._replicas:
                self.changed(replica, now)

    def probe_succeeded(self, replica: ReplicaState, now: float) -> None:
        """It answered its probe."""
        replica.probed = True
        health = replica.health
        before, silent_at = health.state, health.silent_at
        if silent_at is not None and replica.progress_at > silent_at:
            health.broke_silence()
        health.probe_succeeded(now)
        if health.state is not before:
            self._replicas.changed()

    def probe_failed(
        self, replica: ReplicaState, now: float, *, refused: bool, asked_at: float | None
    ) -> None:
        """It did not answer its probe; see ``Fleet.probe_failed``."""
        if asked_at is not None and replica.progress_at > asked_at:
            return
        before = replica.health.state
        if refused:
            replica.health.connect_failed(now)
            self._caches.unreachable(replica.index)
        else:
            replica.health.probe_failed(now, late=asked_at is not None)
        replica.probed = True
        self._may_be_ejected(replica, before, now)

    def models_reported(self, replica: ReplicaState, models: frozenset[str]) -> None:
        """The names of the models it serves."""
        if replica.models != models:
            replica.models = models
            replica.hardware_told()
            self._replicas.changed()

    def engine_found(self, replica: ReplicaState, engine: str) -> None:
        """Which kind of server it is, or ``UNNAMED``."""
        if replica.engine != engine:
            replica.engine = engine
            self._replicas.changed()

    def drained(self, replica: ReplicaState, now: float, *, on: bool) -> None:
        """This router's operator takes it out of new work (``on``) or gives it back."""
        replica.drain_ordered(on, replica.drain_version + 1)
        if self.journal is not None:
            self.journal.drained(replica)
        self.changed(replica, now)

    def changed(self, replica: ReplicaState, now: float) -> None:
        """It may get work now, or no more: those who wait for it go out, or elsewhere."""
        self._replicas.changed()
        if replica.serving and not replica.resting:
            self._holding.room_made(replica, now)
        else:
            self._holding.rehome(replica, now)

    def _may_be_ejected(self, replica: ReplicaState, before: HealthState, now: float) -> None:
        ejected = replica.health.state is HealthState.EJECTED
        if ejected and before is not HealthState.EJECTED and self.journal is not None:
            self.journal.replica_failed(replica)
        self.changed(replica, now)
