"""How far two greedy answers to one prompt agree: up to the first token that differs they share a context."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log

from sim.acceptance.token_answers import TokenAnswer

LEAST_PROBABILITY = 1e-9


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of one pair of answers."""

    positions: int
    """Compared: the equal ones, and the first that differs."""
    matched: int
    kl: float | None
    """Mean over the positions compared, in nats; ``None`` without log-probabilities."""

    @property
    def flipped(self) -> bool:
        """The answers are not the same."""
        return self.matched < self.positions


def agreement(reference: TokenAnswer, other: TokenAnswer) -> Agreement:
    """After the first difference the two continue different texts, so nothing behind it is compared.

    >>> one = TokenAnswer(("a", "b", "c"), (), 0.1, 0.2)
    >>> agreement(one, TokenAnswer(("a", "x", "c"), (), 0.1, 0.2))
    Agreement(positions=2, matched=1, kl=None)
    """
    shortest = min(len(reference.tokens), len(other.tokens))
    matched = next(
        (at for at in range(shortest) if reference.tokens[at] != other.tokens[at]),
        shortest,
    )
    differs = matched < max(len(reference.tokens), len(other.tokens))
    positions = matched + differs
    both = [
        kl_divergence(one, two)
        for one, two in zip(reference.tops[:positions], other.tops[:positions], strict=False)
        if one and two
    ]
    return Agreement(positions, matched, sum(both) / len(both) if both else None)


def kl_divergence(reference: Mapping[str, float], other: Mapping[str, float]) -> float:
    """KL of the likeliest tokens that both list, with all others as one: a lower bound of the whole.

    >>> round(kl_divergence({"a": log(0.5), "b": log(0.5)}, {"a": log(0.25), "b": log(0.75)}), 4)
    0.1438
    >>> kl_divergence({"a": log(0.9)}, {"a": log(0.9)})
    0.0
    """
    shared = reference.keys() & other.keys()
    first = [exp(reference[token]) for token in sorted(shared)]
    second = [exp(other[token]) for token in sorted(shared)]
    pairs = [*zip(first, second, strict=True), (1.0 - sum(first), 1.0 - sum(second))]
    total = 0.0
    for one, two in pairs:
        if one > LEAST_PROBABILITY:
            total += one * log(one / max(two, LEAST_PROBABILITY))
    return max(0.0, total)
