"""Runs over HTTP beside the same simulated: how far apart, and whether policies come in the same order."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import sqrt
from statistics import fmean, variance

from rich import box
from rich.table import Table

from sim.results import Result

CACHED_WITHIN = 0.01
TTFT_WITHIN = 0.10
CHANCE = 2.0
"""Standard deviations by which chance alone may part live and simulated runs."""
SHORT_MS = 100.0
"""Below it tenths of a millisecond are shown."""

WITHIN, BY_CHANCE, OFF = "", "~", "!"
"""How a figure is marked: as near as promised; not, but no further off than chance explains; further."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a policy, by round: of the live run, and of every simulated one."""

    live: tuple[float, ...]
    simulated: tuple[tuple[float, ...], ...]

    @property
    def live_mean(self) -> float:
        """Of the rounds."""
        return fmean(self.live)

    @property
    def mean(self) -> float:
        """Of the simulated ones."""
        return fmean(value for seeds in self.simulated for value in seeds)

    @property
    def chance(self) -> float:
        """Standard deviation that chance alone gives the difference of the two means.

        Simulated runs of one round differ by chance alone, and a live run is one such draw.

        >>> seeds = (0.49, 0.51)
        >>> [round(Figure((0.5,) * rounds, (seeds,) * rounds).chance, 4) for rounds in (1, 2)]
        [0.0173, 0.0122]
        """
        of_one = fmean(variance(seeds) if len(seeds) > 1 else 0.0 for seeds in self.simulated)
        draws = sum(map(len, self.simulated))
        return sqrt(of_one * (1.0 / len(self.live) + 1.0 / draws))

    @property
    def off(self) -> float:
        """Relative error of the simulation; positive where it is more."""
        return self.mean / self.live_mean - 1.0 if self.live_mean else 0.0

    def mark(self, allowed: float) -> str:
        """``WITHIN`` what is allowed, else ``BY_CHANCE`` or ``OFF``."""
        off = abs(self.mean - self.live_mean)
        if off <= allowed:
            return WITHIN
        return BY_CHANCE if off <= CHANCE * self.chance else OFF


@dataclass(frozen=True, slots=True)
class Pair:
    """One policy, live and simulated, by round; simulated with several seeds or one."""

    live: tuple[Result, ...]
    simulated: tuple[tuple[Result, ...], ...]
    followed: tuple[Result | None, ...] = ()
    """By round, simulated with the live router's choices (``followed``), where that was done."""
    same_decisions: tuple[float | None, ...] = ()
    """By round, the share of the live router's decisions that a simulated one makes, too, where known."""

    @property
    def policy(self) -> str:
        """Its kind."""
        return self.live[0].policy

    def figure(self, of: Callable[[Result], float | None]) -> Figure:
        """``of`` both; what a run does not tell counts as 0."""
        return Figure(
            tuple(of(one) or 0.0 for one in self.live),
            tuple(tuple(of(one) or 0.0 for one in seeds) for seeds in self.simulated),
        )

    @property
    def cached(self) -> Figure:
        """Share of prompt tokens."""
        return self.figure(lambda result: result.cached_share)

    @property
    def followed_off(self) -> float | None:
        """Cached share of ``followed`` less the live runs'; ``None`` if a round has none."""
        if len(self.followed) < len(self.live):
            return None
        off = 0.0
        for made, live in zip(self.followed, self.live, strict=True):
            if made is None:
                return None
            off += (made.cached_share or 0.0) - (live.cached_share or 0.0)
        return off / len(self.live)

    @property
    def alike(self) -> float | None:
        """Mean of ``same_decisions``; ``None`` if no round has one."""
        known = [share for share in self.same_decisions if share is not None]
        return fmean(known) if known else None

    @property
    def followed_mark(self) -> str:
        """``WITHIN`` what is promised of the cached share, or what one request makes of it; else ``OFF``.

        Which of two prefixes was used last, an answer of a little earlier may decide.
        """
        measured = sum(one.requests for one in self.live)
        allowed = max(CACHED_WITHIN, 1.0 / measured) if measured else CACHED_WITHIN
        return WITHIN if abs(self.followed_off or 0.0) <= allowed else OFF

    @property
    def ttft(self) -> Figure:
        """The median, in seconds."""
        return self.figure(lambda result: result.ttft_s.p50)

    @property
    def e2e(self) -> Figure:
        """The mean, in seconds."""
        return self.figure(lambda result: result.e2e_s.mean)


def pairs_of(
    live: Sequence[Sequence[Result]],
    simulated: Sequence[Sequence[Sequence[Result]]],
    followed: Sequence[Sequence[Result | None]] | None = None,
    same_decisions: Sequence[Sequence[float | None]] | None = None,
) -> list[Pair]:
    """By policy, then by round; all in the same order."""
    return [
        Pair(tuple(one), tuple(map(tuple, others)), tuple(same), tuple(alike))
        for one, others, same, alike in zip(
            live, simulated, followed or [()] * len(live), same_decisions or [()] * len(live), strict=True
        )
    ]


def reversed_pairs(pairs: Sequence[Pair]) -> list[tuple[str, str]]:
    """Policies whose median TTFT live differs by over ``TTFT_WITHIN``, and simulated the other way round."""
    found = []
    for one, other in combinations(pairs, 2):
        live = (one.ttft.live_mean, other.ttft.live_mean)
        simulated = (one.ttft.mean, other.ttft.mean)
        apart = max(live) > (1.0 + TTFT_WITHIN) * min(live)
        if apart and (live[0] - live[1]) * (simulated[0] - simulated[1]) < 0.0:
            found.append((one.policy, other.policy))
    return found


def json_object(pairs: Sequence[Pair]) -> dict[str, object]:
    """Every figure, by policy, round and seed; how far off they are, and what chance alone would do."""
    return {
        "live": [[one.json_object() for one in pair.live] for pair in pairs],
        "simulated": [[[one.json_object() for one in seeds] for seeds in pair.simulated] for pair in pairs],
        "cached_share_off": [round(pair.cached.mean - pair.cached.live_mean, 5) for pair in pairs],
        "cached_share_chance": [round(pair.cached.chance, 5) for pair in pairs],
        "cached_share_off_same_choices": [
            None if pair.followed_off is None else round(pair.followed_off, 5) for pair in pairs
        ],
        "decided_alike": [pair.alike for pair in pairs],
        "ttft_p50_off": [round(pair.ttft.off, 4) for pair in pairs],
        "ttft_p50_chance": [round(pair.ttft.chance, 5) for pair in pairs],
        "e2e_mean_off": [round(pair.e2e.off, 4) for pair in pairs],
        "reversed": reversed_pairs(pairs),
    }


def table_of(pairs: Sequence[Pair]) -> Table:
    """One row per policy, with ``Figure.mark``."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    for header in (
        "policy",
        f"cached share\n(within {100 * CACHED_WITHIN:.0f} point)",
        "",
        "same\nchoices",
        "decided\nalike",
        f"TTFT p50, ms\n(within {TTFT_WITHIN:.0%})",
        "",
        "E2E mean, ms",
        "",
        "errors",
    ):
        table.add_column(header, justify="right" if table.columns else "left", no_wrap=True)
    for pair in pairs:
        cached, ttft, e2e = pair.cached, pair.ttft, pair.e2e
        off = cached.mean - cached.live_mean
        table.add_row(
            pair.policy,
            f"{cached.live_mean:.3f} → {cached.mean:.3f} ± {cached.chance:.3f}",
            f"{100 * off:+.1f} {cached.mark(CACHED_WITHIN)}".rstrip(),
            _points(pair),
            "" if pair.alike is None else f"{pair.alike:.0%}",
            f"{_milliseconds(ttft)} ± {1e3 * ttft.chance:.1f}",
            f"{ttft.off:+.1%} {ttft.mark(TTFT_WITHIN * ttft.live_mean)}".rstrip(),
            _milliseconds(e2e),
            f"{e2e.off:+.1%}",
            f"{sum(one.errors for one in pair.live)}",
        )
    return table


def meaning_of_marks(pairs: Sequence[Pair]) -> str:
    """What is promised, what is not, and whether so many requests can tell."""
    told = (
        f"{BY_CHANCE} further off than promised, but within {CHANCE:g} standard deviations of chance alone "
        f"(±); {OFF} further than both"
    )
    coarse = [
        pair.policy
        for pair in pairs
        if CHANCE * pair.cached.chance > CACHED_WITHIN
        or CHANCE * pair.ttft.chance > TTFT_WITHIN * pair.ttft.live_mean
    ]
    if coarse:
        told += (
            f"\nchance may do more than is promised under {', '.join(coarse)}: "
            "send more --requests or --rounds"
        )
    return told


def verdicts(pairs: Sequence[Pair]) -> list[str]:
    """A sentence on each promise: kept, or what is known of where it is not."""
    made = [
        _verdict(
            f"cached share within {100 * CACHED_WITHIN:.0f} point",
            pairs,
            lambda pair: pair.cached,
            lambda pair: CACHED_WITHIN,
            lambda pair, off: f"{100 * off:.1f} points",
        ),
        _verdict(
            f"TTFT p50 within {TTFT_WITHIN:.0%}",
            pairs,
            lambda pair: pair.ttft,
            lambda pair: TTFT_WITHIN * pair.ttft.live_mean,
            lambda pair, off: f"{off / pair.ttft.live_mean:.0%}",
        ),
    ]
    if all(pair.followed_off is not None for pair in pairs):
        wrong = ", ".join(pair.policy for pair in pairs if pair.followed_mark == OFF)
        made.append(
            f"cached share of the live router's own choices within {100 * CACHED_WITHIN:.0f} point or one "
            "request: " + (f"NOT under {wrong}" if wrong else "under every policy")
        )
    return made


def _verdict(
    promise: str,
    pairs: Sequence[Pair],
    figure: Callable[[Pair], Figure],
    allowed: Callable[[Pair], float],
    told: Callable[[Pair, float], str],
) -> str:
    broken: list[str] = []
    unsure: list[str] = []
    for pair in pairs:
        of = figure(pair)
        mark = of.mark(allowed(pair))
        if mark != WITHIN:
            off, chance = abs(of.mean - of.live_mean), CHANCE * of.chance
            row = broken if mark == OFF else unsure
            row.append(f"{pair.policy} ({told(pair, off)}; chance does up to {told(pair, chance)})")
    if broken:
        return f"{promise}: NOT under {', '.join(broken + unsure)}"
    if unsure:
        return f"{promise}: no further off than chance explains under {', '.join(unsure)}"
    return f"{promise}: under every policy"


def verdict_on_order(pairs: Sequence[Pair]) -> str:
    """A sentence."""
    wrong = reversed_pairs(pairs)
    if wrong:
        named = "; ".join(f"{one} and {other}" for one, other in wrong)
        return f"order of policies by TTFT p50: NOT the same: {named}"
    return (
        f"order of policies by TTFT p50: the same (those within {TTFT_WITHIN:.0%} of one another left aside)"
    )


def _points(pair: Pair) -> str:
    off = pair.followed_off
    return "" if off is None else f"{100 * off:+.1f} {pair.followed_mark}".rstrip()


def _milliseconds(figure: Figure) -> str:
    live_ms, simulated_ms = 1e3 * figure.live_mean, 1e3 * figure.mean
    digits = 1 if live_ms < SHORT_MS else 0
    return f"{live_ms:,.{digits}f} → {simulated_ms:,.{digits}f}"
