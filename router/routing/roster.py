"""Which replicas may take a request: usable, serving its model, not tried yet."""

from collections.abc import Collection, Sequence

from router.routing.decision import NoReplica
from router.routing.health import HealthState
from router.routing.replica_state import ReplicaState

MODELS_REMEMBERED = 256


class Candidates:
    """Replicas that may take a request. ``bits``: their indexes."""

    __slots__ = ("bits", "panic", "replicas")

    def __init__(self, replicas: Sequence[ReplicaState], *, panic: bool = False) -> None:
        self.replicas = replicas
        self.bits = sum(1 << replica.index for replica in replicas)
        self.panic = panic
        """Every replica is ejected: the probes may be wrong, and trying beats refusing."""


class Roster:
    """Remembers the answer per model until ``changed`` is called: health, models or draining changed."""

    __slots__ = ("_by_model", "_replicas")

    def __init__(self, replicas: Sequence[ReplicaState]) -> None:
        self._replicas = replicas
        self._by_model: dict[str | None, Candidates] = {}

    def changed(self) -> None:
        """Some replica's health, models or draining changed."""
        self._by_model.clear()

    def candidates(self, model: str | None, tried: Collection[int]) -> Candidates:
        """Who may take a request for ``model``.

        Raises ``NoReplica`` when the model is unknown or nobody is left.
        """
        if not tried:
            known = self._by_model.get(model)
            if known is not None:
                return known
        usable = [replica for replica in self._replicas if replica.usable and replica.index not in tried]
        if model is not None:
            fit = [replica for replica in usable if replica.serves(model)]
            if not fit and usable and not tried and not any(r.serves(model) for r in self._replicas):
                raise NoReplica("unknown_model", f"no replica serves the model {model!r}")
            usable = fit
        if usable:
            found = Candidates(usable)
            if not tried:
                self._remember(model, found)
            return found
        if not tried:
            panic = [r for r in self._replicas if not r.draining and (model is None or r.serves(model))]
            if panic:
                return Candidates(panic, panic=True)
        raise NoReplica("none_usable", "no replica can take the request")

    def _remember(self, model: str | None, found: Candidates) -> None:
        if any(replica.health.state is HealthState.PROBATION for replica in self._replicas):
            return  # usable or not from one request to the next
        if len(self._by_model) >= MODELS_REMEMBERED:
            self._by_model.clear()
        self._by_model[model] = found
