"""Fits what work costs to times of single prefills and steps, and says how far off the fit is."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from replica.contract.prefill_cost import DecodeCost, PrefillCost

NO_ATTENTION_TOKENS = 1e9
"""Where attention doubles a token's cost if no such effect was measured."""
LEAST_PER_TOKEN_S = 1e-9


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One measured prefill: ``new_tokens`` after ``position`` cached ones."""

    new_tokens: int
    position: int
    seconds: float


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One measured decode step with ``sequences`` requests in it."""

    sequences: int
    seconds: float


@dataclass(frozen=True, slots=True)
class FitError:
    """Relative errors of a fit over its points."""

    mean: float
    worst: float


def fit_prefill(points: Sequence[PrefillPoint]) -> tuple[PrefillCost, FitError]:
    """The cost whose relative errors are least in square; no part of it is below zero.

    A fit in which attention is all that tokens cost is noise: then a token costs the same wherever it stands.

    ``seconds = fixed + per_token (m + m (h + m/2) / attention)`` is linear in ``fixed``, ``per_token`` and
    their quotient ``per_token / attention``:

    >>> true = PrefillCost(fixed_s=0.01, per_token_s=50e-6, attention_tokens=20_000.0)
    >>> sizes = [(100, 0), (1_000, 0), (8_000, 0), (500, 8_000)]
    >>> cost, error = fit_prefill([PrefillPoint(m, h, true.seconds(m, h)) for m, h in sizes])
    >>> round(cost.fixed_s, 6), round(1e6 * cost.per_token_s, 3), round(cost.attention_tokens)
    (0.01, 50.0, 20000)
    >>> error.worst < 1e-9
    True

    Raises ValueError without at least two different lengths.
    """
    if len({point.new_tokens for point in points}) < 2:
        raise ValueError(f"{len(points)} points of one length; expected at least two lengths to fit a cost")
    rows: list[tuple[float, ...]] = [
        (1.0, float(point.new_tokens), point.new_tokens * (point.position + point.new_tokens / 2.0))
        for point in points
    ]
    seconds = [point.seconds for point in points]
    fixed, per_token, pairwise = _least_squares(rows, seconds)
    if per_token <= LEAST_PER_TOKEN_S:
        fixed, per_token = _least_squares([row[:2] for row in rows], seconds)
        pairwise = 0.0
    per_token = max(per_token, LEAST_PER_TOKEN_S)
    doubles_at = NO_ATTENTION_TOKENS
    if pairwise > per_token / NO_ATTENTION_TOKENS:
        doubles_at = per_token / pairwise
    cost = PrefillCost(fixed, per_token, doubles_at)
    return cost, _error([cost.seconds(p.new_tokens, p.position) for p in points], seconds)


def fit_decode(points: Sequence[DecodePoint]) -> tuple[DecodeCost, FitError]:
    """The same for decode steps. Raises ValueError without a point.

    >>> cost, _ = fit_decode([DecodePoint(1, 0.009), DecodePoint(8, 0.016)])
    >>> round(cost.fixed_s, 6), round(cost.per_sequence_s, 6)
    (0.008, 0.001)
    """
    if not points:
        raise ValueError("no decode step was measured")
    rows = [(1.0, float(point.sequences)) for point in points]
    seconds = [point.seconds for point in points]
    fixed, per_sequence = _least_squares(rows, seconds) if len(points) > 1 else (seconds[0], 0.0)
    cost = DecodeCost(fixed, per_sequence)
    return cost, _error([cost.step_seconds(point.sequences) for point in points], seconds)


def _error(fitted: Sequence[float], measured: Sequence[float]) -> FitError:
    errors = [abs(one - other) / other for one, other in zip(fitted, measured, strict=True)]
    return FitError(sum(errors) / len(errors), max(errors))


def _least_squares(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients of zero or more that miss ``values`` least, relatively; every subset of them is tried."""
    scaled = [[cell / value for cell in row] for row, value in zip(rows, values, strict=True)]
    width = len(rows[0])
    best, least = [0.0] * width, float("inf")
    for size in range(1, width + 1):
        for columns in combinations(range(width), size):
            found = _solved([[row[column] for column in columns] for row in scaled])
            if found is None or min(found) < 0.0:
                continue
            made = [0.0] * width
            for column, coefficient in zip(columns, found, strict=True):
                made[column] = coefficient
            miss = sum((sum(a * b for a, b in zip(row, made, strict=True)) - 1.0) ** 2 for row in scaled)
            if miss < least * (1.0 - 1e-9):
                best, least = made, miss
    return best


def _solved(rows: Sequence[Sequence[float]]) -> list[float] | None:
    """Least squares of ``row . x = 1`` by the normal equations; ``None`` if the rows do not tell."""
    width = len(rows[0])
    scale = [max(abs(row[column]) for row in rows) or 1.0 for column in range(width)]
    even = [[row[column] / scale[column] for column in range(width)] for row in rows]
    matrix = [
        [sum(row[i] * row[j] for row in even) for j in range(width)] + [sum(row[i] for row in even)]
        for i in range(width)
    ]
    for pivot in range(width):
        top = max(range(pivot, width), key=lambda row: abs(matrix[row][pivot]))
        if abs(matrix[top][pivot]) < 1e-12:
            return None
        matrix[pivot], matrix[top] = matrix[top], matrix[pivot]
        for row in range(width):
            if row != pivot:
                factor = matrix[row][pivot] / matrix[pivot][pivot]
                matrix[row] = [a - factor * b for a, b in zip(matrix[row], matrix[pivot], strict=True)]
    return [matrix[i][width] / matrix[i][i] / scale[i] for i in range(width)]
