"""Runs over HTTP beside the same simulated: how far apart, and whether policies come in the same order."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from rich import box
from rich.table import Table

from sim.results import Result

CACHED_WITHIN = 0.01
TTFT_WITHIN = 0.10


@dataclass(frozen=True, slots=True)
class Pair:
    """One policy, live and simulated."""

    live: Result
    simulated: Result

    @property
    def cached_off(self) -> float:
        """Cached share simulated less live."""
        return (self.simulated.cached_share or 0.0) - (self.live.cached_share or 0.0)

    @property
    def ttft_off(self) -> float | None:
        """Relative error of the simulated median TTFT; positive where it is slower."""
        if not self.live.ttft_s.p50 or self.simulated.ttft_s.p50 is None:
            return None
        return self.simulated.ttft_s.p50 / self.live.ttft_s.p50 - 1.0


def pairs_of(live: Sequence[Result], simulated: Sequence[Result]) -> list[Pair]:
    """By policy; both in the same order."""
    return [Pair(*both) for both in zip(live, simulated, strict=True)]


def reversed_pairs(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Policies whose median TTFT live differs by over ``TTFT_WITHIN``, and simulated the other way round."""
    found = []
    for one, other in combinations(pairs, 2):
        live = (one.live.ttft_s.p50 or 0.0, other.live.ttft_s.p50 or 0.0)
        simulated = (one.simulated.ttft_s.p50 or 0.0, other.simulated.ttft_s.p50 or 0.0)
        apart = max(live) > (1.0 + TTFT_WITHIN) * min(live)
        if apart and (live[0] - live[1]) * (simulated[0] - simulated[1]) < 0.0:
            found.append((one.live.policy, other.live.policy))
    return found


def json_object(pairs: Sequence[Pair]) -> dict[str, object]:
    """Every figure, and the three that are promised."""
    return {
        "live": [pair.live.json_object() for pair in pairs],
        "simulated": [pair.simulated.json_object() for pair in pairs],
        "cached_share_off": [round(pair.cached_off, 5) for pair in pairs],
        "ttft_p50_off": [None if pair.ttft_off is None else round(pair.ttft_off, 4) for pair in pairs],
        "reversed": reversed_pairs(pairs),
    }


def table_of(pairs: Sequence[Pair]) -> Table:
    """One row per policy; what is further off than promised is marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy")
    for header in (
        f"cached share\n(within {100 * CACHED_WITHIN:.0f} point)",
        "",
        f"TTFT p50, ms\n(within {TTFT_WITHIN:.0%})",
        "",
        "TTFT mean, ms",
        "E2E mean, ms",
        "errors",
    ):
        table.add_column(header, justify="right")
    for pair in pairs:
        live, simulated, ttft = pair.live, pair.simulated, pair.ttft_off
        table.add_row(
            live.policy,
            f"{live.cached_share or 0.0:.3f} → {simulated.cached_share or 0.0:.3f}",
            f"{100 * pair.cached_off:+.1f}" + ("" if abs(pair.cached_off) <= CACHED_WITHIN else " !"),
            _milliseconds(live.ttft_s.p50, simulated.ttft_s.p50),
            "-" if ttft is None else f"{ttft:+.1%}" + ("" if abs(ttft) <= TTFT_WITHIN else " !"),
            _milliseconds(live.ttft_s.mean, simulated.ttft_s.mean),
            _milliseconds(live.e2e_s.mean, simulated.e2e_s.mean),
            f"{live.errors}",
        )
    return table


def verdict_on_order(pairs: Sequence[Pair]) -> str:
    """A sentence."""
    wrong = reversed_pairs(pairs)
    if wrong:
        named = "; ".join(f"{one} and {other}" for one, other in wrong)
        return f"order of policies by TTFT p50: NOT the same: {named}"
    return (
        f"order of policies by TTFT p50: the same (those within {TTFT_WITHIN:.0%} of one another left aside)"
    )


def _milliseconds(live_s: float | None, simulated_s: float | None) -> str:
    return f"{1e3 * (live_s or 0.0):,.1f} → {1e3 * (simulated_s or 0.0):,.1f}"
