"""Routers and replicas under the virtual clock; raises the same events on each ``Fleet`` as the proxy.

::

    arrival -> submit (-> held -> outbox) -> network -> replica computes -> network -> first_token, finished
                ^                               |             |
                +--- another replica's turn <---+-- refused --+-- died with it
"""

import random
from collections.abc import Callable
from collections.abc import Sequence as Sequences

from replica.sequence import Sequence
from router.routing.decision import NoReplica
from router.routing.hold_queue import Held
from router.routing.in_flight import InFlight, Usage
from router.routing.kv_route import Step
from router.routing.prompt_blocks import Prompt
from router.routing.replica_state import ReplicaSpec
from router.routing.retry import Failure
from sim.event_queue import EventQueue
from sim.fleet_change import FleetChange
from sim.outcome import Outcome
from sim.replica_row import ReplicaRow
from sim.simulated_replica import ReplicaEvents
from sim.simulated_request import Prefilled, SimulatedRequest, carried_by
from sim.simulated_router import SimulatedRouter
from sim.two_pools import KvMoves, pullable_tokens
from sim.workload.arrivals import Arrival

HOLD_TICK_S = 0.05
"""How often a router looks after the requests it holds. (The proxy's is 10 ms.)"""
MakePrompt = Callable[[Arrival], Prompt]
MakeRow = Callable[[ReplicaEvents], ReplicaRow]


class SimulatedFleet:
    """Sends a plan of arrivals through routers to replicas and keeps what became of each."""

    def __init__(
        self,
        queue: EventQueue,
        routers: Sequences[SimulatedRouter],
        make_row: MakeRow,
        plan: Sequences[Arrival],
        make_prompt: MakePrompt,
        *,
        block_tokens: int,
        rng: random.Random,
        network_delay_s: float = 0.0,
        report_interval_s: float = 2.0,
        report_lag_s: float = 0.0,
        changes: Sequences[FleetChange] = (),
        restarted: Callable[[int], None] | None = None,
        moves: KvMoves | None = None,
    ) -> None:
        """``rng`` picks each request's router. ``network_delay_s`` is one way.

        Replicas are probed, and report their load and with it their cache's capacity, at the start and every
        ``report_interval_s``; what they report arrives ``report_lag_s`` late.
        ``restarted`` hears of lost caches. ``moves``: how long KV takes from one replica to another.
        """
        self.queue = queue
        self.outcomes: list[Outcome | None] = [None] * len(plan)
        """By position in the plan."""
        self._routers = routers
        self._row = make_row(ReplicaEvents(self._first_token, self._finished, self._refused))
        self._plan = plan
        self._make_prompt = make_prompt
        self._block_tokens = block_tokens
        self._rng = rng
        self._delay_s = network_delay_s
        self._report_interval_s = report_interval_s
        self._report_lag_s = report_lag_s
        self._restarted = restarted
        self._moves = moves
        self.handed_over = 0
        """Requests that were prefilled by one replica and answered by another."""
        self.pulled_tokens = 0
        """Prompt tokens whose KV came from another replica."""
        self._absent: dict[int, ReplicaSpec] = {}
        """Replicas that have yet to join."""
        self._ticking = False
        self._done = 0
        for change in changes:
            queue.at(change.at_s, self._change, change)
        joining = [change for change in changes if change.kind == "join"]
        joining.sort(key=lambda change: change.at_s)
        for change in reversed(joining):  # a fleet gives the index freed last to whoever joins first
            self._leave_out(change.replica)
        self._report()
        for interval_s in sorted({r.metrics_every_s for r in routers if r.metrics_every_s}):
            self._measure(interval_s)
        starts = [position for position, arrival in enumerate(plan) if arrival.at_s is not None]
        self._starts = iter(sorted(starts, key=lambda position: plan[position].at_s or 0.0))
        self._next_start()

    @property
    def done(self) -> int:
        """Requests that are over."""
        return self._done

    @property
    def row(self) -> ReplicaRow:
        """The replicas, to be read."""
        return self._row

    @property
    def _running(self) -> bool:
        return self._done < len(self._plan)

    # --- what replicas tell, and what becomes of them ---------------------------------------------

    def _report(self) -> None:
        for replica in range(len(self._row)):
            if replica not in self._absent:
                self._probe(replica)
        self.send_held()
        if self._running:
            self.queue.at(self.queue.now + self._report_interval_s, self._report)

    def _probe(self, replica: int) -> None:
        now, report = self.queue.now, self._row.report(replica)
        for router in self._routers:
            fleet = router.fleet
            if report is None:
                fleet.probe_failed(replica, now, refused=True)
                continue
            fleet.probe_succeeded(replica, now)
            if self._report_lag_s and now:
                late_s = now + self._report_lag_s
                self.queue.at(late_s, fleet.load_reported, replica, report, late_s)
            else:
                fleet.load_reported(replica, report, now)

    def _leave_out(self, replica: int) -> None:
        """Before the start: ``replica`` is not there yet."""
        for router in self._routers:
            self._absent[replica] = router.fleet.replicas[replica].spec
            router.fleet.replica_removed(replica, 0.0)
            router.fleet.forget_departed()

    def _join(self, replica: int) -> None:
        spec = self._absent.pop(replica)
        for router in self._routers:
            added = router.fleet.replica_added(spec)
            assert added.index == replica, "routers and row name replicas alike"
        self._probe(replica)

    def _measure(self, interval_s: float) -> None:
        reports = self._row.reports()
        for router in self._routers:
            if router.metrics_every_s == interval_s:
                router.measured(reports, self.queue.now)
        if self._running:
            self.queue.at(self.queue.now + interval_s, self._measure, interval_s)

    def _change(self, change: FleetChange) -> None:
        now, replica = self.queue.now, change.replica
        lost: list[Sequence] = []
        match change.kind:
            case "fail":
                lost = self._row.fail(replica)
            case "restart":
                lost = self._row.restart(replica)
                if self._restarted is not None:
                    self._restarted(replica)
            case "join":
                self._join(replica)
            case "resume":
                for router in self._routers:
                    router.fleet.drained(replica, now, on=False)
            case "drain":
                for router in self._routers:
                    router.fleet.drained(replica, now)
        for sequence in lost:
            self._later(self._lost, sequence)
        self.send_held()

    # --- a request's life -------------------------------------------------------------------------

    def _next_start(self) -> None:
        position = next(self._starts, None)
        if position is not None:
            self.queue.at(self._plan[position].at_s or 0.0, self._start, position)

    def _start(self, position: int) -> None:
        self._arrive(position)
        self._next_start()

    def _arrive(self, position: int) -> None:
        now, arrival = self.queue.now, self._plan[position]
        routers = self._routers
        router = routers[0] if len(routers) == 1 else self._rng.choice(routers)
        request = SimulatedRequest(position, self._make_prompt(arrival), router, now)
        try:
            made = router.submit(request.prompt, now, arrival.request.session, request)
        except NoReplica:
            self._close(request, None, "no replica")
            return
        if isinstance(made, Held):
            self._tick_later()
        else:
            self._send(request, made)

    def _tick_later(self) -> None:
        if not self._ticking:
            self._ticking = True
            self.queue.at(self.queue.now + HOLD_TICK_S, self._tick)

    def _tick(self) -> None:
        self._ticking = False
        for router in self._routers:
            router.fleet.tick(self.queue.now)
            if router.fleet.held:
                self._tick_later()
        self.send_held()

    def send_held(self) -> None:
        """After every event that may have made room: pass on what the routers let go."""
        for router in self._routers:
            outbox = router.fleet.outbox
            while outbox:
                held = outbox.pop(0)
                request = held.context
                assert isinstance(request, SimulatedRequest)
                if held.flight is None:
                    self._close(request, None, "no replica")
                    continue
                router.sent(held.flight, self.queue.now)
                self._send(request, held.flight)

    def _send(self, request: SimulatedRequest, flight: InFlight) -> None:
        request.flight = flight
        request.tried = (*request.tried, flight.replica.index)
        wanted = self._plan[request.position].request
        route = flight.decision.route
        first_step = route is not None and route.step is Step.PREFILL
        sequence = Sequence.of_blocks(
            str(request.position),
            wanted.block_ids,
            wanted.prompt_tokens,
            1 if first_step else wanted.output_tokens,
            block_size=self._block_tokens,
            output_block_ids=wanted.output_block_ids,
            parameters=request,
        )
        if self._delay_s:
            self.queue.at(self.queue.now + self._delay_s, self._reach, flight.replica.index, sequence)
        else:
            self._reach(flight.replica.index, sequence)

    def _reach(self, replica: int, sequence: Sequence) -> None:
        request = carried_by(sequence)
        request.moved_tokens = 0
        assert request.flight is not None
        if request.flight.pulled:
            reached = self._pull(replica, request, sequence)
        else:
            reached = self._row.accept(replica, sequence)
        if not reached:
            self._later(self._unreachable, sequence)

    def _pull(self, replica: int, request: SimulatedRequest, sequence: Sequence) -> bool:
        """It is told where its KV can be had: it pulls what is really there. False: nobody listens."""
        assert request.flight is not None and self._moves is not None
        route, row = request.flight.decision.route, self._row
        if route is None or route.other is None or not row.up[route.other]:
            return row.accept(replica, sequence)
        there, missing = pullable_tokens(sequence, row.scheduler(route.other), row.scheduler(replica))
        if not missing:
            return row.accept(replica, sequence)
        last = sequence.prompt_tokens - 1
        if request.prefilled is not None and there == last // self._block_tokens * self._block_tokens:
            missing += last - there
            request.moved_tokens = last  # the block in which the prompt ends comes, too
        self.pulled_tokens += missing
        return row.pull(replica, sequence, there, self._moves.seconds(missing))

    def _later(self, action: Callable[[Sequence], None], sequence: Sequence) -> None:
        """``action`` when what happened at a replica has come to its router."""
        if self._delay_s:
            self.queue.at(self.queue.now + self._delay_s, action, sequence)
        else:
            action(sequence)

    def _first_token(self, sequence: Sequence) -> None:
        self._later(self._first_token_seen, sequence)

    def _finished(self, sequence: Sequence) -> None:
        self._later(self._end_seen, sequence)

    def _first_token_seen(self, sequence: Sequence) -> None:
        request = carried_by(sequence)
        assert request.flight is not None
        if not request.in_first_step:
            request.first_token_s = self.queue.now
        request.router.first_token(request.flight, self.queue.now)
        self.send_held()

    def _end_seen(self, sequence: Sequence) -> None:
        request = carried_by(sequence)
        assert request.flight is not None
        first_step = request.in_first_step
        output_tokens = None if first_step else sequence.output_tokens
        usage = Usage(sequence.prompt_tokens, output_tokens, sequence.cached_tokens)
        request.router.finished(request.flight, self.queue.now, usage)
        self.send_held()
        if first_step:
            self._hand_over(request, sequence)
        else:
            self._close(request, sequence, None)

    def _hand_over(self, request: SimulatedRequest, sequence: Sequence) -> None:
        """Its prompt is prefilled: another replica pulls the KV and answers."""
        assert request.flight is not None
        source = request.flight.replica
        request.prefilled = Prefilled(source.index, sequence.cached_tokens)
        session = self._plan[request.position].request.session
        flight = request.router.hand_over(request.prompt, self.queue.now, source, session)
        if flight is None:
            self._close(request, sequence, "no replica")
            return
        self.handed_over += 1
        self._send(request, flight)
        self.send_held()

    def _refused(self, sequence: Sequence) -> None:
        request = carried_by(sequence)
        assert request.flight is not None
        request.router.refused(request.flight, self.queue.now)
        self.send_held()
        self._close(request, sequence, "too long for the replica")

    def _unreachable(self, sequence: Sequence) -> None:
        self._failed(carried_by(sequence), sequence, Failure.CONNECT)

    def _lost(self, sequence: Sequence) -> None:
        request = carried_by(sequence)
        before = request.first_token_s is None
        self._failed(request, sequence, Failure.CLOSED if before else Failure.BROKEN)

    def _failed(self, request: SimulatedRequest, sequence: Sequence, failure: Failure) -> None:
        now, router = self.queue.now, request.router
        assert request.flight is not None
        first_step = request.in_first_step
        router.failed(request.flight, now, failure)
        session = self._plan[request.position].request.session
        turn = router.prefill_again if first_step else router.try_again
        again = turn(request.prompt, now, failure, request.tried, session)
        self.send_held()
        if again is not None:
            self._send(request, again)
        else:
            self._close(request, sequence, "replica failed")

    def _close(self, request: SimulatedRequest, sequence: Sequence | None, error: str | None) -> None:
        now, arrival = self.queue.now, self._plan[request.position]
        self.outcomes[request.position] = request.outcome(sequence, arrival.request.prompt_tokens, now, error)
        self._done += 1
        if arrival.next_turn is not None:
            # A failed turn does not end a session: the trace tells what was said next.
            pause_s = self._plan[arrival.next_turn].think_s
            self.queue.at(now + pause_s, self._arrive, arrival.next_turn)
