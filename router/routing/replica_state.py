"""One replica as the router knows it: its health, its ledger, what its work costs, what it told."""

from dataclasses import dataclass, field

from replica.contract.load_report import LoadReport
from router.routing.block_source import BlockSettings
from router.routing.calibration import ReplicaCost
from router.routing.credit import Credit
from router.routing.health import Health, HealthState
from router.routing.hold import HoldQueue
from router.routing.ledger import Ledger


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """A replica as the operator names it."""

    name: str
    url: str
    model: str | None = None
    weight: float = 1.0
    tags: tuple[str, ...] = ()
    blocks: BlockSettings = field(default_factory=BlockSettings)
    """What is known of its KV blocks."""


class ReplicaState:
    """The fleet alone changes it; policies and reports read it (``view.Candidate``)."""

    __slots__ = (
        "cost",
        "credit",
        "draining",
        "health",
        "held",
        "index",
        "kv_tokens",
        "last_report",
        "leaving",
        "ledger",
        "models",
        "name",
        "probed",
        "requests",
        "room_price_s",
        "spec",
        "weight",
    )

    def __init__(self, index: int, spec: ReplicaSpec, health: Health, cost: ReplicaCost) -> None:
        self.index = index
        self.name = spec.name
        self.ledger = Ledger(cost)
        self.held = HoldQueue()
        self.health = health
        self.cost = cost
        self.credit = Credit()
        self.draining = False
        self.leaving = False
        """Taken out of the config: forgotten once nothing is in flight there."""
        self.models: frozenset[str] | None
        """Models it serves; ``None`` until it told."""
        self.respecified(spec)
        self.last_report: LoadReport | None = None
        self.kv_tokens: int | None = None
        self.room_price_s = 0.0
        self.probed = False
        self.requests = 0

    @property
    def in_flight(self) -> int:
        """Requests sent and not over."""
        return self.ledger.in_flight

    @property
    def usable(self) -> bool:
        """May take new work."""
        return self.serving and (self.health.state is not HealthState.PROBATION or self.in_flight == 0)

    @property
    def serving(self) -> bool:
        """Gets work, if not always as much as the others: neither on its way out nor ejected nor unknown."""
        if self.draining or self.leaving:
            return False
        return self.health.state not in (HealthState.EJECTED, HealthState.UNKNOWN)

    def serves(self, model: str) -> bool:
        """Serves ``model``, or has not told what it serves."""
        return self.models is None or model in self.models

    def respecified(self, spec: ReplicaSpec) -> None:
        """The operator's word on it."""
        self.spec = spec
        self.weight = spec.weight
        self.models = frozenset({spec.model}) if spec.model else None

    def reported(self, report: LoadReport) -> None:
        """Its own gauges. KV room costs nothing up to 80% in use, rising to one second when full."""
        self.last_report = report
        usage = report.kv_usage
        self.room_price_s = 0.0 if usage is None else min(1.0, max(0.0, (usage - 0.8) / 0.2))
