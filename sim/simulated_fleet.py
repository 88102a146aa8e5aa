"""Router and replicas under the virtual clock; raises the same events on the router's ``Fleet`` as the proxy.

::

    arrival -> submit (-> held -> outbox) -> network -> replica computes -> network -> first_token, finished
"""

from collections.abc import Sequence as Sequences

from replica.sequence import Sequence
from router.routing.decision import Reason
from router.routing.fleet import Fleet
from router.routing.hold import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.prompt_blocks import Prompt
from sim.event_queue import EventQueue
from sim.outcome import Outcome
from sim.simulated_replica import ReplicaEvents, ReplicaSettings, SimulatedReplica
from sim.step_time.step_time import StepTime
from sim.workload.arrivals import Arrival


class _Request:
    """One request on its way; the sequence on the replica carries it as its ``parameters``."""

    __slots__ = ("arrived_s", "first_token_s", "flight", "position")

    def __init__(self, position: int, flight: InFlight, arrived_s: float) -> None:
        self.position = position
        self.flight = flight
        self.arrived_s = arrived_s
        self.first_token_s: float | None = None


class SimulatedFleet:
    """Sends a plan of arrivals through one router to ``replicas`` and keeps what became of each."""

    def __init__(
        self,
        fleet: Fleet,
        plan: Sequences[Arrival],
        prompts: Sequences[Prompt],
        *,
        settings: ReplicaSettings,
        step_time: StepTime,
        block_tokens: int,
        network_delay_s: float = 0.0,
        report_interval_s: float = 2.0,
    ) -> None:
        """``prompts`` are the router's view of ``plan``, one each. ``network_delay_s`` is one way.

        Replicas report their load (and with it their cache's capacity, which bounds the router's index) at
        the start and every ``report_interval_s``.
        """
        self.queue = EventQueue()
        self.outcomes: list[Outcome | None] = [None] * len(plan)
        """By position in the plan."""
        self._fleet = fleet
        self._plan = plan
        self._prompts = prompts
        self._block_tokens = block_tokens
        self._delay_s = network_delay_s
        self._report_interval_s = report_interval_s
        self._open = len(plan)
        self._done = 0
        wanted = _blocks_wanted(plan, block_tokens, shared=settings.prefix_caching)
        events = ReplicaEvents(self._first_token, self._finished, self._refused)
        self._replicas = [
            SimulatedReplica(settings.scheduler(block_tokens, wanted), step_time, self.queue, events)
            for _ in fleet.replicas
        ]
        self._report()
        for position, arrival in enumerate(plan):
            if arrival.at_s is not None:
                self.queue.at(arrival.at_s, self._arrive, position)

    @property
    def done(self) -> int:
        """Requests that are over."""
        return self._done

    def _report(self) -> None:
        now = self.queue.now
        for index, replica in enumerate(self._replicas):
            self._fleet.load_reported(index, replica.load(), now)
        if self._done < self._open:
            self.queue.at(now + self._report_interval_s, self._report)

    def _arrive(self, position: int) -> None:
        now = self.queue.now
        session = self._plan[position].request.session
        made = self._fleet.submit(self._prompts[position], now, session=session, context=(position, now))
        if not isinstance(made, Held):
            self._send(position, made, now)

    def _send_held(self) -> None:
        """After every event that may have made room: pass on what the router let go."""
        outbox = self._fleet.outbox
        while outbox:
            held = outbox.pop(0)
            assert held.flight is not None, "no replica is left"
            self._send(held.context[0], held.flight, held.context[1])

    def _send(self, position: int, flight: InFlight, arrived_s: float) -> None:
        request = self._plan[position].request
        sequence = Sequence.of_blocks(
            str(position),
            request.block_ids,
            request.prompt_tokens,
            request.output_tokens,
            block_size=self._block_tokens,
            parameters=_Request(position, flight, arrived_s),
        )
        replica = self._replicas[flight.replica.index]
        if self._delay_s:
            self.queue.at(self.queue.now + self._delay_s, replica.accept, sequence)
        else:
            replica.accept(sequence)

    def _first_token(self, sequence: Sequence) -> None:
        if self._delay_s:
            self.queue.at(self.queue.now + self._delay_s, self._first_token_seen, sequence)
        else:
            self._first_token_seen(sequence)

    def _finished(self, sequence: Sequence) -> None:
        if self._delay_s:
            self.queue.at(self.queue.now + self._delay_s, self._end_seen, sequence)
        else:
            self._end_seen(sequence)

    def _first_token_seen(self, sequence: Sequence) -> None:
        request = _request(sequence)
        request.first_token_s = self.queue.now
        self._fleet.first_token(request.flight, self.queue.now)
        self._send_held()

    def _end_seen(self, sequence: Sequence) -> None:
        request = _request(sequence)
        usage = Usage(sequence.prompt_tokens, sequence.output_tokens, sequence.cached_tokens)
        self._fleet.finished(request.flight, self.queue.now, usage)
        self._send_held()
        self._close(request, sequence, None)

    def _refused(self, sequence: Sequence) -> None:
        request = _request(sequence)
        self._fleet.refused(request.flight, self.queue.now)
        self._send_held()
        self._close(request, sequence, "too long for the replica")

    def _close(self, request: _Request, sequence: Sequence, error: str | None) -> None:
        now = self.queue.now
        first = request.first_token_s
        self.outcomes[request.position] = Outcome(
            sent_s=request.arrived_s,
            prompt_tokens=sequence.prompt_tokens,
            output_tokens=sequence.output_tokens,
            cached_tokens=sequence.cached_tokens,
            ttft_s=None if first is None else first - request.arrived_s,
            e2e_s=now - request.arrived_s,
            replica=request.flight.replica.index,
            spilled=request.flight.decision.reason is Reason.SPILL,
            error=error,
        )
        self._done += 1
        arrival = self._plan[request.position]
        if arrival.next_turn is not None:
            # A failed turn does not end a session: the trace tells what was said next.
            pause_s = self._plan[arrival.next_turn].think_s
            self.queue.at(now + pause_s, self._arrive, arrival.next_turn)


def _blocks_wanted(plan: Sequences[Arrival], block_tokens: int, *, shared: bool) -> int:
    """Blocks with which one replica could hold all there is, had it every request and none ever finished.

    More would never be used, but cost memory and time to set up.
    """
    named: set[int] = set()
    unnamed = 0
    for arrival in plan:
        request = arrival.request
        tokens = request.prompt_tokens + request.output_tokens
        if shared:
            named.update(request.block_ids)
            tokens -= len(request.block_ids) * block_tokens
        unnamed += -(-tokens // block_tokens)
    # Twice what has a name: requests that compute the same block at the same time keep two copies of it.
    return 2 * len(named) + unnamed


def _request(sequence: Sequence) -> _Request:
    request = sequence.parameters
    assert isinstance(request, _Request)
    return request
