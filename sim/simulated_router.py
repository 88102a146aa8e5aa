"""One router under the virtual clock: a ``Fleet`` that hears what the proxy would tell it, and retries."""

from contextlib import suppress

from replica.contract.load_report import LoadReport
from router.routing.decision import Decision, NoReplica
from router.routing.fleet import Fleet
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaState
from router.routing.retry import RETRYABLE, Failure, RetryBudget, RetrySettings
from sim.watcher import Watcher


class SimulatedRouter:
    """Passes every event on to the fleet, and to the policy if it watches.

    Held requests that were sent meanwhile lie in ``fleet.outbox``; whoever raises events empties it.
    """

    __slots__ = ("_budget", "_retries", "_watcher", "fleet")

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._watcher = fleet.policy if isinstance(fleet.policy, Watcher) else None
        self._retries = RetrySettings()
        self._budget = RetryBudget(self._retries)

    @property
    def metrics_every_s(self) -> float | None:
        """How often its policy wants ``measured``."""
        return None if self._watcher is None else self._watcher.metrics_every_s

    def submit(self, prompt: Prompt, now: float, session: str | None, context: object) -> InFlight | Held:
        """Decide and send, or hold. Raises ``NoReplica``."""
        self._budget.earn()
        if self._watcher is not None:
            self._watcher.arriving(prompt)
        made = self.fleet.submit(prompt, now, session=session, context=context, two_steps=True)
        if not isinstance(made, Held):
            self.sent(made, now)
        return made

    def sent(self, flight: InFlight, now: float) -> None:
        """``flight`` is on its way: sent at once, or out of ``fleet.outbox``."""
        if self._watcher is not None:
            self._watcher.sent(flight, now)

    def hand_over(
        self, prompt: Prompt, now: float, source: ReplicaState, session: str | None
    ) -> InFlight | None:
        """``source`` has computed the prompt: who answers. ``None``: nobody is left."""
        try:
            decision = self.fleet.decide_answerer(prompt, now, source, session=session)
        except NoReplica:
            return None
        return self._again(prompt, decision, now)

    def prefill_again(
        self, prompt: Prompt, now: float, failure: Failure, tried: tuple[int, ...], session: str | None
    ) -> InFlight | None:
        """The first of two steps failed: another prefill replica's turn, else that of who answers."""
        decision = None
        if failure in RETRYABLE and len(tried) < self._retries.attempts:
            with suppress(NoReplica):
                decision = self.fleet.decide_prefill(prompt, now, tried=tried)
            if decision is not None and not self._budget.take(failure, len(tried)):
                decision = None
        if decision is None:
            try:
                decision = self.fleet.decide(prompt, now, tried=tried, session=session)
            except NoReplica:
                return None
        return self._again(prompt, decision, now)

    def _again(self, prompt: Prompt, decision: Decision, now: float) -> InFlight:
        if self._watcher is not None:
            self._watcher.arriving(prompt)
        flight = self.fleet.sent(prompt, decision, now)
        self.sent(flight, now)
        return flight

    def try_again(
        self, prompt: Prompt, now: float, failure: Failure, tried: tuple[int, ...], session: str | None
    ) -> InFlight | None:
        """Another replica's turn, as the proxy would have it; ``None``: the client gets the error."""
        if failure not in RETRYABLE or len(tried) >= self._retries.attempts:
            return None
        if self._watcher is not None:
            self._watcher.arriving(prompt)
        try:
            decision = self.fleet.decide(prompt, now, tried=tried, session=session)
        except NoReplica:
            return None
        if not self._budget.take(failure, len(tried)):
            return None
        flight = self.fleet.sent(prompt, decision, now)
        self.sent(flight, now)
        return flight

    def first_token(self, flight: InFlight, now: float) -> None:
        """The first token passed through."""
        self.fleet.first_token(flight, now)
        if self._watcher is not None:
            self._watcher.first_token(flight, now)

    def finished(self, flight: InFlight, now: float, usage: Usage) -> None:
        """The last token passed through."""
        self.fleet.finished(flight, now, usage)
        self._over(flight, now)

    def refused(self, flight: InFlight, now: float) -> None:
        """The replica does not take such a request."""
        self.fleet.refused(flight, now)
        self._over(flight, now)

    def failed(self, flight: InFlight, now: float, failure: Failure) -> None:
        """The attempt failed by the replica's fault."""
        self.fleet.failed(flight, now, failure)
        self._over(flight, now)

    def measured(self, reports: list[LoadReport | None], now: float) -> None:
        """Metrics were read for the policy."""
        if self._watcher is not None:
            replicas = list(self.fleet.replicas)
            self._watcher.measured(replicas, [reports[replica.index] for replica in replicas], now)

    def _over(self, flight: InFlight, now: float) -> None:
        if self._watcher is not None:
            self._watcher.over(flight, now)
