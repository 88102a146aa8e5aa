"""Which replicas there are, and which may take a request: usable, serving its model, not tried yet."""

from collections.abc import Collection, Iterator, Sequence

from router.routing.decision import NoReplica
from router.routing.health import HealthState
from router.routing.kv_route import KvPull, Role
from router.routing.replica_state import ReplicaState

MODELS_REMEMBERED = 256


class Candidates:
    """Replicas that may take a request. ``bits``: their indexes."""

    __slots__ = ("bits", "moves_kv", "panic", "replicas")

    def __init__(self, replicas: Sequence[ReplicaState], *, panic: bool = False) -> None:
        self.replicas = replicas
        self.bits = sum(1 << replica.index for replica in replicas)
        self.moves_kv = any(replica.spec.moves_kv for replica in replicas)
        """Some have a role, or can pull KV: see ``pools.py``."""
        self.panic = panic
        """No replica is known to be well: the probes may be wrong, and trying beats refusing."""


class Roster(Collection[ReplicaState]):
    """The replicas, each under an index that it keeps. Iteration is by index, over those that leave, too.

    Who may take a request is remembered per model until ``changed`` is called. An index that is free again
    is given to the next replica that joins, the one freed last first, so indexes stay small.
    """

    __slots__ = ("_by_model", "_free", "_serving", "by_index", "engines", "moves_kv", "sidecars", "slots")

    def __init__(self) -> None:
        self.by_index: dict[int, ReplicaState] = {}
        self.slots = 0
        """Indexes ever given; every index is below."""
        self.engines: frozenset[str | None] = frozenset()
        """What they run (``ReplicaState.engine``), those that leave, too."""
        self.moves_kv = False
        """Some replicas have a role, or can pull KV: see ``pools.py``."""
        self.sidecars = False
        """All prefill replicas, of which there are some, are asked by the sidecar of the one who answers."""
        self._free: list[int] = []
        self._by_model: dict[str | None, Candidates] = {}
        self._serving: Sequence[ReplicaState] | None = None

    def __getitem__(self, index: int) -> ReplicaState:
        """The replica with ``index``. Raises ``KeyError``."""
        return self.by_index[index]

    def __iter__(self) -> Iterator[ReplicaState]:
        return iter(self.by_index.values())

    def __len__(self) -> int:
        return len(self.by_index)

    def __contains__(self, replica: object) -> bool:
        return isinstance(replica, ReplicaState) and self.by_index.get(replica.index) is replica

    # --- who there is ---------------------------------------------------------------------------

    @property
    def staying(self) -> list[ReplicaState]:
        """Those that were not removed; no two have the same name."""
        return [replica for replica in self if not replica.leaving]

    @property
    def next_index(self) -> int:
        """The index of the next replica that joins."""
        return self._free[-1] if self._free else self.slots

    def joined(self, replica: ReplicaState) -> None:
        """One more replica, made with ``next_index``."""
        assert replica.index == self.next_index, "an index of its own"
        members = self.by_index
        members[replica.index] = replica
        if self._free:
            self._free.pop()
            ordered = sorted(members.items())
            members.clear()
            members.update(ordered)
        else:
            self.slots += 1
        self.changed()

    def gone(self, replica: ReplicaState) -> None:
        """The replica is no longer there; its index is free."""
        del self.by_index[replica.index]
        self._free.append(replica.index)
        self.changed()

    def changed(self) -> None:
        """Some replica's health, models, engine or draining changed."""
        self._by_model.clear()
        self._serving = None
        self.engines = frozenset(replica.engine for replica in self)
        self.moves_kv = any(replica.spec.moves_kv for replica in self)
        prefilling = [replica for replica in self if replica.role is Role.PREFILL]
        self.sidecars = bool(prefilling) and all(one.spec.kv_pull is KvPull.LLMD for one in prefilling)

    # --- who may take a request -----------------------------------------------------------------

    @property
    def serving(self) -> Sequence[ReplicaState]:
        """Those among whom the traffic is shared: not drained, not leaving, not ejected, not unknown."""
        if self._serving is None:
            self._serving = [replica for replica in self if replica.serving]
        return self._serving

    def candidates(
        self, model: str | None, tried: Collection[int], within: Collection[int] | None = None
    ) -> Candidates:
        """Who may take a request for ``model``; of those whose indexes are in ``within``, if that is given.

        Raises ``NoReplica`` when the model is unknown or nobody is left.
        """
        if not tried and within is None:
            known = self._by_model.get(model)
            if known is not None:
                return known
        asked = self if within is None else [replica for replica in self if replica.index in within]
        usable = [replica for replica in asked if replica.usable and replica.index not in tried]
        if model is not None:
            fit = [replica for replica in usable if replica.serves(model)]
            some = usable or (within is not None and any(replica.usable for replica in self))
            if not fit and some and not tried and not any(r.may_serve(model) for r in self):
                raise NoReplica("unknown_model", f"no replica serves the model {model!r}")
            usable = fit
        if usable:
            found = Candidates(_rested(usable))
            if not tried and within is None:
                self._remember(model, found)
            return found
        out = [r for r in asked if not (r.draining or r.leaving) and (model is None or r.serves(model))]
        if not any(replica.usable for replica in out):
            panic = [replica for replica in out if replica.index not in tried]
            if panic:
                return Candidates(panic, panic=True)
        raise NoReplica("none_usable", "no replica can take the request")

    def _remember(self, model: str | None, found: Candidates) -> None:
        if any(replica.health.state is HealthState.PROBATION for replica in self):
            return  # usable or not from one request to the next
        if len(self._by_model) >= MODELS_REMEMBERED:
            self._by_model.clear()
        self._by_model[model] = found


def _rested(usable: list[ReplicaState]) -> list[ReplicaState]:
    """Without those that want to be left alone, where another has the same part."""
    roles = {replica.role for replica in usable if not replica.resting}
    return [replica for replica in usable if not replica.resting or replica.role not in roles]
