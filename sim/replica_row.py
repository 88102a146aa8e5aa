"""The replicas of one simulated fleet: what each can do, which are up, what they report."""

from collections.abc import Callable, Sequence

from replica.contract.kv_events import CacheEvent
from replica.contract.load_report import LoadReport
from replica.scheduler import Scheduler
from replica.sequence import Sequence as Request
from sim.event_queue import EventQueue
from sim.simulated_replica import ReplicaEvents, ReplicaSettings, SimulatedReplica
from sim.step_time.slowed import SlowedStepTime
from sim.step_time.step_time import StepTime

MakeScheduler = Callable[[ReplicaSettings], Scheduler]
CacheEventSink = Callable[[int, list[CacheEvent]], None]


class ReplicaRow:
    """Replicas by their position in the fleet."""

    __slots__ = ("_make", "_replicas", "_settings", "up")

    def __init__(
        self,
        queue: EventQueue,
        settings: Sequence[ReplicaSettings],
        step_time: StepTime,
        events: ReplicaEvents,
        make_scheduler: MakeScheduler,
        cache_events: CacheEventSink | None = None,
    ) -> None:
        """One replica per entry of ``settings``. ``cache_events`` gets (replica, events) after each step."""
        self._settings = settings
        self._make = make_scheduler
        self._replicas = [
            SimulatedReplica(
                make_scheduler(one),
                step_time if one.slowdown == 1.0 else SlowedStepTime(step_time, one.slowdown),
                queue,
                events,
                None if cache_events is None else _sink(cache_events, index),
            )
            for index, one in enumerate(settings)
        ]
        self.up = [True] * len(self._replicas)
        """Whether somebody listens there."""

    def __len__(self) -> int:
        return len(self._replicas)

    def accept(self, replica: int, request: Request) -> bool:
        """``request`` reaches ``replica`` now; False: nobody listens there."""
        if not self.up[replica]:
            return False
        self._replicas[replica].accept(request)
        return True

    def pull(self, replica: int, request: Request, tokens: int, seconds: float) -> bool:
        """The same, of a request that pulls KV of its first ``tokens`` from another replica."""
        if not self.up[replica]:
            return False
        self._replicas[replica].pull(request, tokens, seconds)
        return True

    def fail(self, replica: int) -> list[Request]:
        """``replica`` dies and stays away. Returns whom it had."""
        self.up[replica] = False
        return self._replicas[replica].crash(self._make(self._settings[replica]))

    def restart(self, replica: int) -> list[Request]:
        """``replica`` is back, with an empty cache. Returns whom it had, if it was up."""
        lost = self.fail(replica) if self.up[replica] else []
        self.up[replica] = True
        return lost

    def report(self, replica: int) -> LoadReport | None:
        """Its gauges; ``None`` from one that is down."""
        return self._replicas[replica].load() if self.up[replica] else None

    def reports(self) -> list[LoadReport | None]:
        """All gauges."""
        return [self.report(replica) for replica in range(len(self._replicas))]

    def scheduler(self, replica: int) -> Scheduler:
        """What ``replica`` really holds and does; to be read."""
        return self._replicas[replica].scheduler


def _sink(cache_events: CacheEventSink, replica: int) -> Callable[[list[CacheEvent]], None]:
    return lambda events: cache_events(replica, events)
