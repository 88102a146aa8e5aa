"""Whether a replica may be used: one table of transitions from what probes and traffic saw.

``unknown``   configured or joined lately, and not probed yet, or too busy to answer that in time; not used.
``healthy``   used.
``suspect``   failed lately, not often enough to be ejected; used.
``ejected``   not used until its back-off ends and a probe succeeds; so is one whose first answer is bad.
``probation`` back, one request at a time until one succeeds.
A replica that is ``silent`` is ejected, too, though it answers its probes; it is healthy again as soon as it
produces something.
Draining is the operator's wish and stands beside this: no new work, what runs may finish.
"""

from dataclasses import dataclass
from enum import StrEnum


class HealthState(StrEnum):
    """How far a replica is trusted."""

    UNKNOWN = "unknown"
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    EJECTED = "ejected"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """When a replica is ejected and when it may come back."""

    failures_to_eject: int = 3
    """Failed requests in a row (5xx, broken transfer, time-out)."""
    probe_failures_to_eject: int = 2
    """Failed probes in a row."""
    backoff_s: float = 1.0
    """First ejection lasts at least this long; doubled each time in a row."""
    max_backoff_s: float = 30.0
    silent_after_s: float | None = 30.0
    """A request that waits for its first byte so long may show that the replica hangs; ``None``: never."""
    silent_factor: float = 5.0
    """If it also waits so many times as long as predicted."""


class Health:
    """One replica's health.

    >>> health = Health(HealthSettings(failures_to_eject=2, backoff_s=1.0))
    >>> health.request_failed(now=0.0); health.state
    <HealthState.SUSPECT: 'suspect'>
    >>> health.request_failed(now=0.1); health.state
    <HealthState.EJECTED: 'ejected'>
    >>> health.probe_succeeded(now=0.5); health.state          # too early
    <HealthState.EJECTED: 'ejected'>
    >>> health.probe_succeeded(now=1.2); health.state
    <HealthState.PROBATION: 'probation'>
    >>> health.request_succeeded(); health.state
    <HealthState.HEALTHY: 'healthy'>
    """

    __slots__ = (
        "_ejected_until",
        "_ejections",
        "_failures",
        "_probe_failures",
        "settings",
        "silent_at",
        "state",
        "unreachable",
    )

    def __init__(self, settings: HealthSettings, state: HealthState = HealthState.HEALTHY) -> None:
        self.settings = settings
        self.state = state
        self.unreachable = False
        """Ejected because nobody was there to answer; what was sent there will hardly be answered, either."""
        self.silent_at: float | None = None
        """When it was last ejected because it produced nothing; ``None``: it produced something since."""
        self._failures = 0
        self._probe_failures = 0
        self._ejections = 0
        self._ejected_until = 0.0

    def request_succeeded(self) -> None:
        """A request got its answer."""
        if self._failures or self.state is not HealthState.HEALTHY:
            self._failures = 0
            self._ejections = 0
            if self.state is not HealthState.EJECTED:
                self.state = HealthState.HEALTHY
                self.silent_at = None

    def request_failed(self, now: float) -> None:
        """A request failed by the replica's fault: 5xx, broken transfer, no first byte in time."""
        self._failures += 1
        untried = self.state in (HealthState.PROBATION, HealthState.UNKNOWN)
        if untried or self._failures >= self.settings.failures_to_eject:
            self._eject(now)
        elif self.state is HealthState.HEALTHY:
            self.state = HealthState.SUSPECT

    def found_silent(self, now: float) -> None:
        """It answers, and has produced nothing for too long."""
        self._eject(now)
        self.silent_at = now

    def broke_silence(self) -> None:
        """It was found silent, answers its probes, and has produced something since."""
        self.silent_at = None
        self._failures = self._ejections = 0
        self.state = HealthState.HEALTHY

    def doubted(self) -> None:
        """Another router ejected the replica. It may be that router's network: one failure here decides."""
        if self.state in (HealthState.HEALTHY, HealthState.SUSPECT):
            self._failures = max(self._failures, self.settings.failures_to_eject - 1)
            self._probe_failures = max(self._probe_failures, self.settings.probe_failures_to_eject - 1)
            self.state = HealthState.SUSPECT

    def connect_failed(self, now: float) -> None:
        """No connection could be made: nobody is there, and the next request would fail as well."""
        self._failures += 1
        self.unreachable = True
        self._eject(now)

    def probe_succeeded(self, now: float) -> None:
        """The replica answered its probe."""
        self._probe_failures = 0
        self.unreachable = False
        if self.state is HealthState.EJECTED and now >= self._ejected_until:
            self.state = HealthState.PROBATION
            self._failures = 0
        elif self.state is HealthState.UNKNOWN:
            self.state = HealthState.HEALTHY

    def probe_failed(self, now: float, *, late: bool = False) -> None:
        """The replica did not answer its probe as a healthy one does; ``late``: it did not answer in time."""
        self._probe_failures += 1
        untried = self.state is HealthState.UNKNOWN and not late
        if untried or self._probe_failures >= self.settings.probe_failures_to_eject:
            self.unreachable = True
            self._eject(now)

    def _eject(self, now: float) -> None:
        settings = self.settings
        if self.state is not HealthState.EJECTED:
            self._ejections += 1
        self.silent_at = None
        self.state = HealthState.EJECTED
        backoff = settings.backoff_s * 2.0 ** min(10, self._ejections - 1)
        self._ejected_until = now + min(settings.max_backoff_s, backoff)
