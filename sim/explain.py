"""``simulate --explain``: decisions in which two policies part, with every candidate's numbers."""

import random
from collections.abc import Iterator
from dataclasses import replace

from router.routing.decision import Assessment
from sim.contender import Contender, contender
from sim.shadow import Difference, Shadow
from sim.simulate import Progress, SimulationSettings, run_once
from sim.workload.arrivals import plan_arrivals
from sim.workload.trace import Trace

MOST_ROWS = 12
"""Candidates shown per decision: the cheapest, and the two in question."""


def explain_differences(
    trace: Trace,
    policy: str,
    other: str,
    *,
    most: int,
    replicas: int = 8,
    rate: float = 1.0,
    seed: int = 1,
    settings: SimulationSettings | None = None,
    progress: Progress | None = None,
) -> Shadow:
    """Run ``policy`` with ``other`` looking on. Raises ValueError for an unknown policy.

    Of the measured part of the run, the ``most`` decisions are kept that ``policy`` would regret most.
    """
    settings = settings or SimulationSettings()
    first, second = contender(policy), contender(other)
    for one in (first, second):
        if one.pooled:
            raise ValueError(f"{one.name} has a cache of its own kind and cannot be compared by decisions")
    plan = plan_arrivals(trace, rate=rate, seed=seed, mean_think_s=settings.mean_think_s)
    last_s = max((arrival.at_s or 0.0 for arrival in plan), default=0.0)
    made: list[Shadow] = []

    def make(rng: random.Random) -> Shadow:
        looking_on = second.make(random.Random(f"{seed} shadow {other}"))
        shadow = Shadow(first.make(rng), looking_on, most, settings.warmup_share * last_s)
        made.append(shadow)
        return shadow

    together = Contender(first.name, make, first.holds)
    run_once(trace, plan, together, replicas, seed, replace(settings, routers=1), progress)
    return made[0]


def lines(shadow: Shadow, policy: str, other: str) -> Iterator[str]:
    """The report, line by line."""
    share = shadow.different / shadow.decisions if shadow.decisions else 0.0
    counts = f"{shadow.different:,} of {shadow.decisions:,} decisions ({share:.1%})"
    yield f"{counts} would have been others under {other}."
    shown = shadow.differences
    if shown:
        yield f"The {len(shown)} that {policy} would have paid most for, in order of time:"
    for place, difference in enumerate(shown, 1):
        yield ""
        yield from _difference(place, difference, policy, other)


def _difference(place: int, difference: Difference, policy: str, other: str) -> Iterator[str]:
    yield (
        f"{place}. decision {difference.number:,} at {difference.now:,.2f} s: "
        f"{difference.prompt_tokens:,} prompt tokens"
    )
    chosen, instead = difference.row(difference.chosen.replica), difference.row(difference.other.replica)
    yield (
        f"   {policy}: replica {chosen.replica} ({difference.chosen.reason}); "
        f"{other}: replica {instead.replica} ({difference.other.reason})"
    )
    yield "   " + reason(chosen, instead)
    header = ["replica", "matched", "wait ms", "prefill ms", "imposed ms", "total ms"]
    if difference.other_scores:
        header.append(f"{other}'s score")
    yield "   " + "  ".join(f"{name:>10}" for name in header)
    for row in _shown(difference):
        mark = "*" if row.replica == chosen.replica else "o" if row.replica == instead.replica else " "
        score = difference.other_scores.get(row.replica)
        cells = [
            f"{mark} {row.replica}",
            f"{row.matched_tokens:,}",
            *(f"{1e3 * seconds:,.0f}" for seconds in (row.wait_s, row.prefill_s, row.imposed_s, row.total_s)),
        ]
        if difference.other_scores:
            cells.append("-" if score is None else f"{score:,.4g}")
        yield "   " + "  ".join(f"{cell:>10}" for cell in cells)
    flight = difference.flight
    if flight is not None and flight.first_token_at is not None:
        waited_ms = 1e3 * (flight.first_token_at - difference.now)
        yield f"   It went to replica {flight.replica.index}: first token after {waited_ms:,.0f} ms."


def _shown(difference: Difference) -> list[Assessment]:
    wanted = {difference.chosen.replica, difference.other.replica}
    cheapest = sorted(difference.rows, key=lambda row: row.total_s)[:MOST_ROWS]
    return [row for row in difference.rows if row.replica in wanted or row in cheapest]


def reason(chosen: Assessment, instead: Assessment) -> str:
    """What ``instead`` would have cost more or less than ``chosen``.

    >>> reason(Assessment(2, 0, 0.0, 0.6, 0.1, 0.7), Assessment(5, 8_000, 0.9, 0.1, 0.1, 1.1))
    'replica 5 costs 400 ms more: its wait 900 ms more, prefill 500 ms less, others and decoding the same.'
    """
    parts = [
        ("its wait", instead.wait_s - chosen.wait_s),
        ("prefill", instead.prefill_s - chosen.prefill_s),
        ("others and decoding", instead.imposed_s - chosen.imposed_s),
    ]
    told = ", ".join(f"{name} {_more(seconds)}" for name, seconds in parts)
    total = _more(instead.total_s - chosen.total_s)
    return f"replica {instead.replica} costs {total}: {told}."


def _more(seconds: float) -> str:
    ms = round(1e3 * seconds)
    if not ms:
        return "the same"
    return f"{abs(ms):,} ms {'more' if ms > 0 else 'less'}"
