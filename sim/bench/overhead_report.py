"""The overhead bench's results: a table, what this router costs against each rival, or JSON."""

from collections.abc import Sequence
from typing import Any

from rich import box
from rich.table import Table

from sim.bench.overhead import OverheadPlan, RouterCost
from sim.bench.routers import OURS, Absent

REQUEST_COLUMNS = ("CPU µs", "answers/s")
CLUMPED = 0.05
"""More is marked: such a router, or a machine this busy, makes the time between tokens look better."""


def cost_table(costs: Sequence[RouterCost], plan: OverheadPlan) -> Table:
    """Every router's figures, one row each."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("\nrouter", no_wrap=True)
    for size in plan.sizes_kib:
        for number, header in enumerate(REQUEST_COLUMNS):
            above = "" if number else f"{size} KiB"
            table.add_column(f"{above}\n{header}", justify="right", no_wrap=True)
    headers = (
        "event\nCPU µs",
        "p99\nms late",
        "events\nclumped",
        "events\nlost",
        "answers\nfailed",
        "memory\nMiB",
    )
    for header in headers:
        table.add_column(header, justify="right", no_wrap=True)
    for cost in costs:
        row = [cost.name]
        for size in plan.sizes_kib:
            row += [f"{cost.requests[size].cpu_us:,.0f}", f"{cost.requests[size].answers_per_s:,.0f}"]
        failed = sum(request.failed for request in cost.requests.values())
        event = cost.event
        clumped = f"{event.clumped_share:.1%}" + (" ▲" if event.clumped_share > CLUMPED else "")
        row += [f"{event.cpu_us:,.1f}", f"{event.delay_p99_ms:,.1f}", clumped, f"{event.lost:,}"]
        row += [f"{failed:,}", f"{cost.memory_mib:,.0f}"]
        table.add_row(*row)
    return table


def ratios(costs: Sequence[RouterCost]) -> dict[str, dict[str, float]]:
    """This router's CPU over each rival's: by rival, then "2 KiB", …, "event". Below 1 is cheaper.

    What a rival did not do whole, or with less CPU than can be told, is left out.
    """
    own = next((cost for cost in costs if cost.name == OURS), None)
    if own is None:
        return {}
    against = {}
    for cost in costs:
        if cost is own:
            continue
        pairs = {
            f"{size} KiB": (own.requests[size].cpu_us, request.cpu_us)
            for size, request in cost.requests.items()
            if not request.failed
        }
        if not cost.event.lost:
            pairs["event"] = (own.event.cpu_us, cost.event.cpu_us)
        against[cost.name] = {name: ours / theirs for name, (ours, theirs) in pairs.items() if theirs > 0.0}
    return against


def ratio_table(costs: Sequence[RouterCost], plan: OverheadPlan) -> Table:
    """``ratios`` for people."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    columns = [f"{size} KiB" for size in plan.sizes_kib] + ["event"]
    table.add_column(f"{OURS}'s CPU over that of", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for rival, against in ratios(costs).items():
        shown = [f"{against[column]:.2f}" if column in against else "-" for column in columns]
        table.add_row(rival, *shown)
    return table


def as_json(
    costs: Sequence[RouterCost], absent: Sequence[Absent], plan: OverheadPlan, *, load: str, compiled: bool
) -> dict[str, Any]:
    """All of it as one object."""
    return {
        "load": load,
        "compiled": compiled,
        "rounds": plan.rounds,
        "seconds": plan.seconds,
        "routers": [
            {
                "router": cost.name,
                "requests": [
                    {
                        "prompt_kib": size,
                        "cpu_us": round(request.cpu_us, 2),
                        "answers_per_s": round(request.answers_per_s, 1),
                        "failed": request.failed,
                    }
                    for size, request in cost.requests.items()
                ],
                "event": {
                    "cpu_us": round(cost.event.cpu_us, 2),
                    "lost": cost.event.lost,
                    "delay_p99_ms": round(cost.event.delay_p99_ms, 2),
                    "clumped_share": round(cost.event.clumped_share, 4),
                },
                "memory_mib": round(cost.memory_mib, 1),
            }
            for cost in costs
        ],
        "cpu_ratio": {
            rival: {name: round(ratio, 3) for name, ratio in against.items()}
            for rival, against in ratios(costs).items()
        },
        "not_measured": [{"router": one.name, "why": one.why} for one in absent],
    }
