"""The replicas of a running router: how a change of the list reaches all that keep something per replica."""

import asyncio
from collections.abc import Iterable, Mapping

from router.config import RouterConfig
from router.config_errors import ConfigError
from router.proxy.config_change import ReplicaChanges
from router.proxy.fleet_config import replica_spec
from router.proxy.kv_event_feed import KvEventFeed
from router.proxy.prober import Prober
from router.proxy.replica_access import ReplicaAccess, replica_accesses
from router.proxy.service import Service
from router.replica_config import ReplicaConfig
from router.routing.fleet import Fleet
from router.routing.replica_state import ReplicaState


class ReplicaSet:
    """First what may fail (``accesses``, ``join``), then ``change``, which does not. No ``await`` between."""

    def __init__(self, fleet: Fleet, service: Service, prober: Prober, kv_events: KvEventFeed) -> None:
        self._fleet = fleet
        self._service = service
        self._prober = prober
        self._kv_events = kv_events
        self._accesses: dict[str, ReplicaAccess] = {}

    def accesses(self, old: RouterConfig, new: RouterConfig) -> Mapping[str, ReplicaAccess]:
        """By name, for ``new``; read anew for those that ``old`` does not have so. Raises ``ConfigError``."""
        known = {one.effective_name: one for one in old.replicas}
        fresh = [
            one
            for one in new.replicas
            if known.get(one.effective_name) != one or one.effective_name not in self._accesses
        ]
        return self._accesses | replica_accesses(new.model_copy(update={"replicas": tuple(fresh)}))

    def join(self, joining: Iterable[ReplicaConfig], config: RouterConfig) -> list[ReplicaState]:
        """New replicas, whose events are listened for; none if one of these cannot be: ``ConfigError``."""
        joined: list[ReplicaState] = []
        try:
            for one in joining:
                joined.append(self._fleet.replica_added(replica_spec(one, config)))
                if one.kv_events is not None:
                    self._kv_events.subscribe(joined[-1], one.kv_events)
        except OSError as error:
            for replica in joined:
                self._kv_events.unsubscribe(replica)
                self._fleet.replica_removed(replica.index, self._service.clock())
            raise ConfigError(f"{error.strerror}. Nothing was applied") from None
        return joined

    def change(
        self,
        changes: ReplicaChanges,
        joined: list[ReplicaState],
        config: RouterConfig,
        accesses: Mapping[str, ReplicaAccess],
    ) -> list["asyncio.Future[None]"]:
        """From now on there are those of ``config``. Each future is done when a new one was probed once."""
        now = self._service.clock()
        known = {replica.name: replica for replica in self._fleet.replicas.staying if replica not in joined}
        for name in changes.leaving:
            self._fleet.replica_removed(known[name].index, now)
            self._kv_events.unsubscribe(known[name])
        for one in changes.staying:
            replica, spec = known[one.effective_name], replica_spec(one, config)
            if replica.spec != spec:
                self._fleet.replica_respecified(replica.index, spec)
            self._service.replica_reaccessed(replica, accesses[replica.name])
        self._prober.apply(config, accesses)
        for replica in joined:
            self._service.replica_added(replica, accesses[replica.name])
        self._accesses = {one.effective_name: accesses[one.effective_name] for one in config.replicas}
        probed = [self._prober.watch(replica, accesses[replica.name]) for replica in joined]
        self._service.send_released(now)
        return probed
