"""Runs over HTTP beside the same simulated: how far apart, and whether policies come in the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import fmean, pstdev

from rich import box
from rich.table import Table

from sim.results import Result

CACHED_WITHIN = 0.01
TTFT_WITHIN = 0.10
CHANCE = 2.0
"""Standard deviations of the simulated runs within which a live run, which is one draw, may lie."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a policy: of the live run, and of every simulated one."""

    live: float
    simulated: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Of the simulated ones."""
        return fmean(self.simulated)

    @property
    def chance(self) -> float:
        """Standard deviation of the simulated ones, which differ by chance alone."""
        return pstdev(self.simulated)

    @property
    def off(self) -> float:
        """Relative error of the simulation; positive where it is more."""
        return self.mean / self.live - 1.0 if self.live else 0.0

    def within(self, allowed: float) -> bool:
        """The simulation's mean is no further off than ``allowed``, or than chance explains."""
        return abs(self.mean - self.live) <= max(allowed, CHANCE * self.chance)


@dataclass(frozen=True, slots=True)
class Pair:
    """One policy, live and simulated, with several seeds or one."""

    live: Result
    simulated: tuple[Result, ...]

    def figure(self, of: Callable[[Result], float | None]) -> Figure:
        """``of`` both; what a run does not tell counts as 0."""
        return Figure(of(self.live) or 0.0, tuple(of(one) or 0.0 for one in self.simulated))

    @property
    def cached(self) -> Figure:
        """Share of prompt tokens."""
        return self.figure(lambda result: result.cached_share)

    @property
    def ttft(self) -> Figure:
        """The median, in seconds."""
        return self.figure(lambda result: result.ttft_s.p50)


def pairs_of(live: Sequence[Result], simulated: Sequence[Sequence[Result]]) -> list[Pair]:
    """By policy; both in the same order."""
    return [Pair(one, tuple(others)) for one, others in zip(live, simulated, strict=True)]


def reversed_pairs(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Policies whose median TTFT live differs by over ``TTFT_WITHIN``, and simulated the other way round."""
    found = []
    for one, other in combinations(pairs, 2):
        live = (one.ttft.live, other.ttft.live)
        simulated = (one.ttft.mean, other.ttft.mean)
        apart = max(live) > (1.0 + TTFT_WITHIN) * min(live)
        if apart and (live[0] - live[1]) * (simulated[0] - simulated[1]) < 0.0:
            found.append((one.live.policy, other.live.policy))
    return found


def json_object(pairs: Sequence[Pair]) -> dict[str, object]:
    """Every figure, the simulated ones seed by seed, and the three that are promised."""
    return {
        "live": [pair.live.json_object() for pair in pairs],
        "simulated": [[one.json_object() for one in pair.simulated] for pair in pairs],
        "cached_share_off": [round(pair.cached.mean - pair.cached.live, 5) for pair in pairs],
        "cached_share_chance": [round(pair.cached.chance, 5) for pair in pairs],
        "ttft_p50_off": [round(pair.ttft.off, 4) for pair in pairs],
        "ttft_p50_chance": [round(pair.ttft.chance, 5) for pair in pairs],
        "reversed": reversed_pairs(pairs),
    }


def table_of(pairs: Sequence[Pair]) -> Table:
    """One row per policy; what is further off than promised, and than chance explains, is marked."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    table.add_column("policy")
    for header in (
        f"cached share\n(within {100 * CACHED_WITHIN:.0f} point)",
        "",
        f"TTFT p50, ms\n(within {TTFT_WITHIN:.0%})",
        "",
        "TTFT mean, ms",
        "",
        "E2E mean, ms",
        "",
        "errors",
    ):
        table.add_column(header, justify="right")
    for pair in pairs:
        cached, ttft = pair.cached, pair.ttft
        off = cached.mean - cached.live
        means = [
            pair.figure(lambda result: result.ttft_s.mean),
            pair.figure(lambda result: result.e2e_s.mean),
        ]
        table.add_row(
            pair.live.policy,
            f"{cached.live:.3f} → {cached.mean:.3f} ± {cached.chance:.3f}",
            f"{100 * off:+.1f}" + ("" if cached.within(CACHED_WITHIN) else " !"),
            f"{_milliseconds(ttft)} ± {1e3 * ttft.chance:.1f}",
            f"{ttft.off:+.1%}" + ("" if ttft.within(TTFT_WITHIN * ttft.live) else " !"),
            *(text for mean in means for text in (_milliseconds(mean), f"{mean.off:+.1%}")),
            f"{pair.live.errors}",
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


def _milliseconds(figure: Figure) -> str:
    return f"{1e3 * figure.live:,.1f} → {1e3 * figure.mean:,.1f}"
