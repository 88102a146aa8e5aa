"""The engine bench's results: medians over rounds, and this engine over the other in each of them."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich import box
from rich.table import Table

from sim.bench.engine_load import EngineFigures

Rounds = Mapping[str, Sequence[EngineFigures]]
"""By engine, one entry a round; round n of all engines ran one after the other."""
FIGURES: tuple[tuple[str, Callable[[EngineFigures], float], int], ...] = (
    ("cold TTFT ms", lambda one: one.cold_ms, 0),
    ("cold prefill tok/s", lambda one: one.prompt_tokens / one.cold_ms * 1e3, 0),
    ("cold prefill CPU ms", lambda one: one.cold_cpu_ms, 0),
    ("warm TTFT ms", lambda one: one.warm_ms, 1),
    ("decode alone tok/s", lambda one: one.decode_tok_s, 1),
    ("decode at 8 tok/s", lambda one: one.decode_8_tok_s, 1),
    ("decode at 8 CPU ms/step", lambda one: one.decode_8_cpu_ms, 1),
    ("16 sharing 500 tokens s", lambda one: one.shared_s, 2),
)
"""(what, from a round, digits)."""


def engine_table(rounds: Rounds) -> Table:
    """Medians, a column an engine; with two engines also the first over the second."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    names = list(rounds)
    for header in ("", *names, *(f"{names[0]} / {other}" for other in names[1:])):
        table.add_column(header, justify="left" if not header else "right", no_wrap=True)
    for what, figure, digits in FIGURES:
        row = [what]
        row += [f"{_median(rounds[name], figure):,.{digits}f}" for name in names]
        row += [f"{_ratio(rounds, names[0], other, figure):.2f}" for other in names[1:]]
        table.add_row(*row)
    for share in next(iter(rounds.values()))[0].hits:
        row = [f"cold / warm where {share:.0%} is shared (× (1 - hit))"]
        row += [_speedup(rounds[name], share) for name in names] + [""] * (len(names) - 1)
        table.add_row(*row)
    return table


def as_json(rounds: Rounds, bookkeeping: Mapping[str, float]) -> dict[str, Any]:
    """Medians by engine, ratios of the first engine to the others, bookkeeping in µs per 1,000 tokens."""
    names = list(rounds)
    return {
        "engines": {
            name: {what: round(_median(rounds[name], figure), 3) for what, figure, _ in FIGURES}
            | {
                "cold over warm": {
                    share: dict(zip(("hit", "ratio"), speedup(rounds[name], share), strict=True))
                    for share in rounds[name][0].hits
                }
            }
            for name in names
        },
        "ratios": {
            other: {what: round(_ratio(rounds, names[0], other, figure), 3) for what, figure, _ in FIGURES}
            for other in names[1:]
        },
        "bookkeeping_us_per_1000_tokens": {name: round(us, 1) for name, us in bookkeeping.items()},
    }


def speedup(rounds: Sequence[EngineFigures], share: float) -> tuple[float, float]:
    """(hit fraction, cold TTFT over the TTFT at that hit), medians over the pairs of all rounds."""
    pairs = [pair for one in rounds for pair in one.hits[share]]
    return statistics.median(pair.hit for pair in pairs), statistics.median(pair.ratio for pair in pairs)


def _speedup(rounds: Sequence[EngineFigures], share: float) -> str:
    hit, ratio = speedup(rounds, share)
    return f"{ratio:.2f} at hit {hit:.2f} ({ratio * (1 - hit):.2f})"


def _median(rounds: Sequence[EngineFigures], figure: Callable[[EngineFigures], float]) -> float:
    return statistics.median(map(figure, rounds))


def _ratio(rounds: Rounds, one: str, other: str, figure: Callable[[EngineFigures], float]) -> float:
    return _median(rounds[one], figure) / max(_median(rounds[other], figure), 1e-9)
