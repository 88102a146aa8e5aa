"""Nelder and Mead's simplex search (1965): the least value of a function of a few positive numbers."""

from collections.abc import Callable, Sequence

Point = tuple[float, ...]


def minimize(
    value: Callable[[Point], float],
    start: Sequence[float],
    *,
    spread: float = 0.2,
    tolerance: float = 1e-3,
    evaluations: int = 400,
) -> tuple[Point, float]:
    """The best point found and its value. All coordinates stay positive: the search is over their ratios.

    Stops when the values at all corners agree to ``tolerance`` (relative), or after ``evaluations`` calls.

    >>> point, least = minimize(lambda p: (p[0] - 3.0) ** 2 + (p[1] * 10.0 - 2.0) ** 2 + 1.0, [1.0, 1.0])
    >>> [round(x, 1) for x in point], round(least, 2)
    ([3.0, 0.2], 1.0)
    """
    begin = tuple(start)
    size = len(begin)
    calls = 0

    def corner(point: Point) -> tuple[float, Point]:
        nonlocal calls
        calls += 1
        return value(point), point

    corners = [corner(begin)]
    for axis in range(size):
        corners.append(corner(tuple(x * (1 + spread) if i == axis else x for i, x in enumerate(begin))))
    while calls < evaluations:
        corners.sort()
        worst, best = corners[-1][0], corners[0][0]
        if worst - best <= tolerance * abs(best):
            break
        others = [point for _, point in corners[:-1]]
        reflected = corner(_beyond(others, corners[-1][1], 1.0))
        if reflected[0] < best:
            corners[-1] = min(corner(_beyond(others, corners[-1][1], 2.0)), reflected)
        elif reflected[0] < corners[-2][0]:
            corners[-1] = reflected
        else:
            contracted = corner(_beyond(others, corners[-1][1], -0.5 if reflected[0] >= worst else 0.5))
            if contracted[0] < min(worst, reflected[0]):
                corners[-1] = contracted
            else:
                head = corners[0][1]
                corners[1:] = [corner(_between(head, point)) for _, point in corners[1:]]
    least, point = min(corners)
    return point, least


def _beyond(others: Sequence[Point], worst: Point, step: float) -> Point:
    """From ``worst`` through the middle of ``others`` and ``step`` times as far on, in ratios."""
    made = []
    for axis, x in enumerate(worst):
        middle = 1.0
        for point in others:
            middle *= point[axis] ** (1.0 / len(others))
        made.append(middle * (middle / x) ** step)
    return tuple(made)


def _between(one: Point, other: Point) -> Point:
    return tuple((a * b) ** 0.5 for a, b in zip(one, other, strict=True))
