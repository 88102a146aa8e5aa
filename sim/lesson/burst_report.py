"""What the burst teaches, for people: the table, and each changed decision explained from its numbers."""

from collections.abc import Iterator, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from router.routing.decision import Assessment
from sim.lesson.burst import BLIND, BOTH, LATE, VARIANTS, Row, Run, Switches, Variant, row_of, run_burst
from sim.lesson.burst_trace import BURST_FROM_S
from sim.lesson.onlooker import Moment
from sim.progress_view import ProgressView
from sim.results_table import print_whole

DECISIONS_SHOWN = 3
EXPLAINED_RULE = "predicted_finish"


def print_burst_lesson(console: Console, *, seeds: int, first_seed: int, decisions: int | None) -> None:
    """Run the lesson and print it."""
    runs = _runs(seeds, first_seed)
    console.print(
        "4 replicas, 48 requests in 3 s: 16 sessions whose KV replicas 0 and 1 have just evicted, and 32 "
        "requests with a hot prefix, which replica 0 still holds. Replicas 2 and 3 are fresh and empty.",
        soft_wrap=True,
    )
    print_whole(console, _table([row_of(variant, runs[variant]) for variant in VARIANTS], seeds))
    for line in _lessons(runs, decisions or DECISIONS_SHOWN):
        console.print(line, soft_wrap=True, markup=False, highlight=False)


def burst_lesson_json(*, seeds: int, first_seed: int) -> list[dict[str, Any]]:
    """The table, and every changed decision of the first seed."""
    runs = _runs(seeds, first_seed)
    return [_json_row(row_of(variant, runs[variant]), runs[variant][0]) for variant in VARIANTS]


def _runs(seeds: int, first_seed: int) -> dict[Variant, list[Run]]:
    runs: dict[Variant, list[Run]] = {}
    with ProgressView() as view:
        for done, variant in enumerate(VARIANTS):
            view.update("bursts", done * seeds, len(VARIANTS) * seeds)
            runs[variant] = [run_burst(variant, seed) for seed in range(first_seed, first_seed + seeds)]
        view.update("bursts", len(VARIANTS) * seeds, len(VARIANTS) * seeds)
    return runs


def _table(rows: Sequence[Row], seeds: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, title=f"means of {seeds} seeds")
    for header in ("rule", "told"):
        table.add_column(header, no_wrap=True)
    for header in ("TTFT s", "p99 s", "in SLO", "work\nmax/mean", "decisions that\nright numbers change"):
        table.add_column(header, justify="right")
    for row in rows:
        table.add_row(
            row.variant.rule,
            str(row.variant.switches),
            f"{row.ttft_s:.2f}",
            f"{row.ttft_p99_s:.1f}",
            f"{row.in_slo_share:.2f}",
            f"{row.max_over_mean_work:.2f}",
            f"{row.changed_share:.0%}",
        )
    return table


_LESSONS: tuple[tuple[Switches, str], ...] = (
    (
        LATE,
        "With the eviction notice late, T is wrong: the old holders look as if a session's prefill cost them "
        "next to nothing. All sessions go to two replicas, the fresh pair idles. Hits do not fall, balance "
        "does.",
    ),
    (
        BLIND,
        "Without reservations, W is wrong: between two readings of the metrics every request sees the same "
        "idle replica. The median hardly suffers, p99 does.",
    ),
    (
        BOTH,
        "They multiply: reservations book T, and T comes from the index, so with a stale index even perfect "
        "reservations under-book.",
    ),
)


def _lessons(runs: dict[Variant, list[Run]], most: int) -> Iterator[str]:
    for switches, lesson in _LESSONS:
        run = runs[Variant(EXPLAINED_RULE, switches)][0]
        changed = [moment for moment in run.moments if moment.decided != moment.rightly]
        yield ""
        yield f"{EXPLAINED_RULE}, {switches}. {lesson}"
        shown = min(most, len(changed))
        yield f"First seed: {len(changed)} of {len(run.moments)} decisions change; the first {shown}:"
        for moment in changed[:most]:
            yield from explained(moment)


def explained(moment: Moment) -> Iterator[str]:
    """One changed decision, in a few lines."""
    taken, better = moment.decided, moment.rightly
    seen, real = _row(moment.seen, taken), _row(moment.right, taken)
    seen_better, real_better = _row(moment.seen, better), _row(moment.right, better)
    yield (
        f"  {moment.now - BURST_FROM_S:+.2f} s, {moment.prompt.units:,} prompt tokens: sent to replica "
        f"{taken}; right numbers say {better}"
    )
    for replica, was, is_ in ((taken, seen, real), (better, seen_better, real_better)):
        yield f"    replica {replica} seemed {_numbers(was)}; is {_numbers(is_)}"
    yield "    " + " ".join(_causes(moment, seen, real, seen_better, real_better))


def _numbers(row: Assessment) -> str:
    return (
        f"{row.matched_tokens:,} cached, wait {1e3 * row.wait_s:,.0f} + prefill {1e3 * row.prefill_s:,.0f} + "
        f"imposed {1e3 * row.imposed_s:,.0f} = {1e3 * row.total_s:,.0f} ms"
    )


def _causes(
    moment: Moment, seen: Assessment, real: Assessment, seen_better: Assessment, real_better: Assessment
) -> Iterator[str]:
    """Which wrong figures made the difference."""
    said = False
    for replica, was, is_ in ((moment.decided, seen, real), (moment.rightly, seen_better, real_better)):
        gone = was.matched_tokens - is_.matched_tokens
        if gone > 0:
            said = True
            cheap_ms = 1e3 * (is_.prefill_s - was.prefill_s)
            yield (
                f"Replica {replica} no longer holds {gone:,} of the tokens believed there: prefill looked "
                f"{cheap_ms:,.0f} ms too cheap."
            )
        elif gone < 0:
            said = True
            yield f"Replica {replica} holds {-gone:,} tokens more than believed."
        missing_ms = 1e3 * (is_.wait_s - was.wait_s)
        if abs(missing_ms) > 1.0:
            said = True
            because = "its bookings were made with wrong prefills"
            if moment.metrics_age_s is not None:
                because = f"its figures are {moment.metrics_age_s:.2f} s old"
            how = "longer" if missing_ms > 0 else "shorter"
            seemed = f"{abs(missing_ms):,.0f} ms {how} than it seemed"
            yield f"The queue of replica {replica} is {seemed}: {because}."
    if not said:
        yield "Only the prices differ: replicas with other requests in flight than it seemed."


def _row(rows: Sequence[Assessment], replica: int) -> Assessment:
    return next(row for row in rows if row.replica == replica)


def _json_row(row: Row, run: Run) -> dict[str, Any]:
    return {
        "rule": row.variant.rule,
        "late": row.variant.switches.late,
        "blind": row.variant.switches.blind,
        "ttft_s": round(row.ttft_s, 4),
        "ttft_p99_s": round(row.ttft_p99_s, 4),
        "in_slo_share": round(row.in_slo_share, 4),
        "max_over_mean_work": round(row.max_over_mean_work, 4),
        "changed_share": round(row.changed_share, 4),
        "changed": [
            {
                "at_s": round(moment.now - BURST_FROM_S, 4),
                "prompt_tokens": moment.prompt.units,
                "decided": moment.decided,
                "rightly": moment.rightly,
                "explanation": list(explained(moment)),
            }
            for moment in run.moments
            if moment.decided != moment.rightly
        ],
    }
