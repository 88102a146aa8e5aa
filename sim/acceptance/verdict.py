"""May traffic move? A rule fixed before the run, on differences paired prompt by prompt."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from sim.acceptance.agreement import Agreement, agreement
from sim.acceptance.token_answers import TokenAnswer
from sim.estimates import Estimate, estimate, paired_difference, paired_ratio

RULE_OF_THREE = 3.0
"""Of n that are all right, with 95% confidence at most 3 in n are wrong."""

Word = Literal["accepted", "rejected", "undecided"]


@dataclass(frozen=True, slots=True)
class Rule:
    """What a candidate may be worse by. Shares of prompts or positions, nats, and of the baseline's time."""

    most_flips: float = 0.05
    most_mismatches: float = 0.01
    most_kl: float = 0.02
    most_slower: float = 0.10

    def lines(self) -> list[str]:
        """For people, before the run."""
        return [
            f"accepted if, with 95% confidence, at most {self.most_flips:.1%} more answers flip, "
            f"{self.most_mismatches:.1%} more top tokens differ, KL grows by at most {self.most_kl:g} nats "
            f"and TTFT by at most {self.most_slower:.0%}; rejected if one is surely worse; else undecided"
        ]


@dataclass(frozen=True, slots=True)
class Measure:
    """One line of the verdict."""

    name: str
    noise: Estimate | None
    """The baseline against itself."""
    candidate: Estimate | None
    """The candidate against the baseline."""
    difference: Estimate
    """Paired."""
    limit: float
    word: Word


@dataclass(frozen=True, slots=True)
class Verdict:
    """All of them."""

    word: Word
    measures: tuple[Measure, ...]
    prompts: int
    """That all three runs answered."""
    errors: tuple[int, int, int]
    """Of the baseline, the candidate, and the baseline again."""

    def json_object(self) -> dict[str, Any]:
        """For programs."""
        return {
            "verdict": self.word,
            "prompts": self.prompts,
            "errors": dict(zip(("baseline", "candidate", "baseline_again"), self.errors, strict=True)),
            "measures": [
                {
                    "name": one.name,
                    "noise": _json(one.noise),
                    "candidate": _json(one.candidate),
                    "difference": _json(one.difference),
                    "limit": one.limit,
                    "verdict": one.word,
                }
                for one in self.measures
            ],
        }


def _json(made: Estimate | None) -> dict[str, float | None] | None:
    return None if made is None else {"mean": made.mean, "half_width": made.half_width}


def verdict(
    baseline: Sequence[TokenAnswer],
    candidate: Sequence[TokenAnswer],
    again: Sequence[TokenAnswer],
    rule: Rule,
) -> Verdict:
    """From three runs over the same prompts: the baseline, the candidate, the baseline once more.

    Raises ValueError when no prompt was answered by all.
    """
    errors = tuple(sum(one.error is not None for one in run) for run in (baseline, candidate, again))
    good = [
        three
        for three in zip(baseline, candidate, again, strict=True)
        if all(one.error is None for one in three)
    ]
    if not good:
        kinds = sorted({one.error for run in (baseline, candidate, again) for one in run if one.error})
        raise ValueError(f"no prompt was answered by both servers: {', '.join(kinds) or 'no prompt at all'}")
    theirs = [agreement(first, other) for first, other, _ in good]
    own = [agreement(first, second) for first, _, second in good]
    measures = [
        _shares("answers that flip", own, theirs, lambda one: (int(one.flipped), 1), rule.most_flips),
        _shares(
            "top tokens that differ",
            own,
            theirs,
            lambda one: (one.positions - one.matched, one.positions),
            rule.most_mismatches,
        ),
    ]
    with_kl = [(one.kl, other.kl) for one, other in zip(own, theirs, strict=True)]
    known = [(one, other) for one, other in with_kl if one is not None and other is not None]
    if known:
        own_kl, their_kl = zip(*known, strict=True)
        measures.append(_measure("KL, nats", own_kl, their_kl, limit=rule.most_kl))
    times = [
        (first.ttft_s, other.ttft_s)
        for first, other, _ in good
        if first.ttft_s is not None and other.ttft_s is not None
    ]
    ratio = paired_ratio([other for _, other in times], [first for first, _ in times]) if times else None
    if ratio is not None:
        word = _word(ratio, rule.most_slower)
        measures.append(Measure("TTFT, share slower", None, None, ratio, rule.most_slower, word))
    words = [one.word for one in measures]
    overall: Word = "accepted" if all(word == "accepted" for word in words) else "undecided"
    if "rejected" in words or errors[1] > max(errors[0], errors[2]):
        overall = "rejected"
    return Verdict(overall, tuple(measures), len(good), (errors[0], errors[1], errors[2]))


def _shares(
    name: str,
    own: Sequence[Agreement],
    theirs: Sequence[Agreement],
    count: Callable[[Agreement], tuple[int, int]],
    limit: float,
) -> Measure:
    """``count`` gives (what is wrong, out of how many). Where nothing was wrong in n, up to 3 / n may be."""

    def shares(pairs: Sequence[Agreement]) -> list[float]:
        return [wrong / max(1, of) for wrong, of in map(count, pairs)]

    least = RULE_OF_THREE / max(1, sum(of for _, of in map(count, theirs)))
    return _measure(name, shares(own), shares(theirs), limit=limit, least_half_width=least)


def _measure(
    name: str,
    noise: Sequence[float],
    candidate: Sequence[float],
    *,
    limit: float,
    least_half_width: float = 0.0,
) -> Measure:
    difference = paired_difference(candidate, noise)
    if difference.half_width is not None:
        difference = replace(difference, half_width=max(difference.half_width, least_half_width))
    return Measure(name, estimate(noise), estimate(candidate), difference, limit, _word(difference, limit))


def _word(difference: Estimate, limit: float) -> Word:
    """Both ends of the interval decide.

    >>> [_word(Estimate(mean, 0.01), 0.05) for mean in (0.0, 0.045, 0.1)]
    ['accepted', 'undecided', 'rejected']
    """
    if difference.half_width is None:
        return "undecided"
    if difference.mean + difference.half_width <= limit:
        return "accepted"
    return "rejected" if difference.mean - difference.half_width > limit else "undecided"
