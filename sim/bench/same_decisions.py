"""A simulated router that is told what a live one was told, event by event: does it decide the same?

It never has its way, so that after a first difference both still stand in the same state. What is left are
near ties: the two read different clocks, and 1 ms decides some of them.
"""

from collections.abc import Sequence
from dataclasses import replace
from enum import IntEnum

from replica.contract.load_report import LoadReport
from router.routing.decision import Decision
from router.routing.fleet import Fleet
from router.routing.in_flight import InFlight, Usage
from router.routing.prompt_blocks import Prompt
from sim.contender import contender
from sim.outcome import Outcome
from sim.simulate import make_fleets
from sim.simulation_settings import SimulationSettings
from sim.workload.trace import Trace


class _What(IntEnum):
    """In the order in which what happens at one time is told."""

    FIRST_TOKEN = 0
    FINISHED = 1
    SENT = 2


def same_decisions(
    trace: Trace,
    live: Sequence[Outcome],
    places: Sequence[int],
    policy: str,
    settings: SimulationSettings,
    seed: int,
) -> float | None:
    """Share of the decisions of a live run of ``trace``, timed, that the simulated router makes, too.

    ``live`` has the outcomes in the trace's order, ``places`` says of each replica they name which one of the
    fleet it is. ``settings`` reads prompts. ``None`` if a request failed, or nobody tells who answered it.
    """
    read = settings.read_prompt
    assert read is not None, "what a live router read is needed"
    if any(one.replica is None or one.ttft_s is None or one.error is not None for one in live):
        return None
    count = len(places)
    (fleet,) = make_fleets(contender(policy), count, trace.block_tokens, seed, replace(settings, hold=False))
    report = LoadReport(capacity_tokens=settings.replica.capacity_tokens, block_size=trace.block_tokens)
    for replica in range(count):
        fleet.probe_succeeded(replica, 0.0)
        fleet.load_reported(replica, report, 0.0)
    flights: dict[int, InFlight] = {}
    same = 0
    for now, what, number in _events(live):
        outcome = live[number]
        if what is _What.FIRST_TOKEN:
            fleet.first_token(flights[number], now)
        elif what is _What.FINISHED:
            usage = Usage(outcome.prompt_tokens, outcome.output_tokens, outcome.cached_tokens)
            fleet.finished(flights.pop(number), now, usage)
        else:
            assert outcome.replica is not None
            prompt, there = read(trace.requests[number]), places[outcome.replica]
            decision = _decided(fleet, prompt, there, now)
            same += fleet.decide(prompt, now).replica == there
            flights[number] = fleet.sent(prompt, decision, now)
    return same / len(live)


def _events(live: Sequence[Outcome]) -> list[tuple[float, _What, int]]:
    events = []
    for number, outcome in enumerate(live):
        events.append((outcome.sent_s, _What.SENT, number))
        events.append((outcome.sent_s + (outcome.ttft_s or 0.0), _What.FIRST_TOKEN, number))
        events.append((outcome.sent_s + outcome.e2e_s, _What.FINISHED, number))
    return sorted(events)


def _decided(fleet: Fleet, prompt: Prompt, there: int, now: float) -> Decision:
    """The decision for ``there``, as the fleet would have made it."""
    decision, rows, request = fleet.explain(prompt, now)
    row = next(row for row in rows if row.replica == there)
    saved_s = fleet.replicas[there].cost.prefill_s(request.prompt_tokens, 0) - row.prefill_s
    return Decision(there, decision.reason, row.matched_tokens, row.wait_s, row.prefill_s, max(0.0, saved_s))
