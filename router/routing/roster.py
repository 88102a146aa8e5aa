"""Which replicas may take a request: usable, serving its model, not tried yet."""

from collections.abc import Collection, Sequence

from router.routing.decision import NoReplica
from router.routing.health import HealthState
from router.routing.replica_state import ReplicaState

MODELS_REMEMBERED = 256


class Roster:
    """Remembers the answer per model until ``changed`` is called: health, models or draining changed."""

    __slots__ = ("_by_model", "_replicas")

    def __init__(self, replicas: Sequence[ReplicaState]) -> None:
        self._replicas = replicas
        self._by_model: dict[str | None, Sequence[ReplicaState]] = {}

    def changed(self) -> None:
        """Some replica's health, models or draining changed."""
        self._by_model.clear()

    def candidates(self, model: str | None, tried: Collection[int]) -> tuple[Sequence[ReplicaState], bool]:
        """Who may take a request for ``model``, and whether this is a panic.

        In a panic every replica is ejected: the probes may be wrong, and trying beats refusing. Raises
        ``NoReplica`` when the model is unknown or nobody is left.
        """
        if not tried:
            known = self._by_model.get(model)
            if known is not None:
                return known, False
        usable = [replica for replica in self._replicas if replica.usable and replica.index not in tried]
        if model is not None:
            fit = [replica for replica in usable if replica.serves(model)]
            if not fit and usable and not tried and not any(r.serves(model) for r in self._replicas):
                raise NoReplica("unknown_model", f"no replica serves the model {model!r}")
            usable = fit
        if usable:
            if not tried:
                self._remember(model, usable)
            return usable, False
        if not tried:
            panic = [r for r in self._replicas if not r.draining and (model is None or r.serves(model))]
            if panic:
                return panic, True
        raise NoReplica("none_usable", "no replica can take the request")

    def _remember(self, model: str | None, usable: Sequence[ReplicaState]) -> None:
        if any(replica.health.state is HealthState.PROBATION for replica in self._replicas):
            return  # usable or not from one request to the next
        if len(self._by_model) >= MODELS_REMEMBERED:
            self._by_model.clear()
        self._by_model[model] = usable
