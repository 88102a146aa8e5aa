"""Which replicas there are: how one joins, is said to be something else, is taken out, and is forgotten."""

from router.routing.availability import Availability
from router.routing.cache_beliefs import CacheBeliefs
from router.routing.calibration import ReplicaCost
from router.routing.fleet_settings import FleetSettings
from router.routing.fleet_speed import FleetSpeed
from router.routing.health import Health, HealthState
from router.routing.replica_state import ReplicaSpec, ReplicaState
from router.routing.roster import Roster
from router.routing.shortlist import Shortlist


class Membership:
    """Owned by the fleet. Fills the roster, and tells all that keep something per replica."""

    __slots__ = ("_availability", "_caches", "_replicas", "_shortlist", "_speed", "settings")

    def __init__(
        self,
        replicas: Roster,
        caches: CacheBeliefs,
        speed: FleetSpeed,
        shortlist: Shortlist,
        availability: Availability,
        settings: FleetSettings,
    ) -> None:
        self._replicas = replicas
        self._caches = caches
        self._speed = speed
        self._shortlist = shortlist
        self._availability = availability
        self.settings = settings

    def founded(self, spec: ReplicaSpec, health: HealthState) -> None:
        """One of the first, which the caches know of."""
        self._join(spec, health)

    def added(self, spec: ReplicaSpec) -> ReplicaState:
        """One joined: it gets work once a probe has found it well."""
        replica = self._join(spec, HealthState.UNKNOWN)
        self._caches.replica_added(replica.index, spec.blocks, self.settings.default_capacity_tokens)
        return replica

    def _join(self, spec: ReplicaSpec, health: HealthState) -> ReplicaState:
        index = self._replicas.next_index
        cost = ReplicaCost(self._speed, spec.prefill, spec.decode)
        replica = ReplicaState(index, spec, Health(self.settings.health, health), cost)
        replica.hardware_told()
        self._replicas.joined(replica)
        self._shortlist.became_idle(index)
        return replica

    def respecified(self, replica: ReplicaState, spec: ReplicaSpec) -> None:
        """Something else is said of the same server with the same blocks."""
        replica.respecified(spec)
        self._replicas.changed()

    def removed(self, replica: ReplicaState, now: float) -> None:
        """No new work for it, what runs there may finish."""
        replica.leaving = True
        self._availability.changed(replica, now)

    def forget_departed(self) -> list[ReplicaState]:
        """Those removed that have nothing in flight any more: all that was known of them is gone."""
        departed = [replica for replica in self._replicas if replica.leaving and not replica.in_flight]
        for replica in departed:
            self._replicas.gone(replica)
            self._caches.replica_gone(replica.index)
            self._speed.leave(replica.cost)
            self._shortlist.became_busy(replica.index)
        return departed
