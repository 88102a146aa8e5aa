"""Positions at which a recurrent state is worth keeping, and where a prefill chunk ends to have it there."""

from collections.abc import Iterable, Sequence


def restart_boundaries(
    tokens: int, units: Sequence[int], interval: int | None = None, junctions: Iterable[int] = ()
) -> list[int]:
    """Positions in a sequence of ``tokens`` known tokens where its state should be kept, ascending.

    For each unit (tokens; the KV block, or finer if blocks can be cut): the last boundary before the last
    token, from where the same prompt starts again, and the last boundary, from where a longer one goes on.
    Also every multiple of ``interval``, and ``junctions``: places where the KV of another request's prefix
    ended (Marconi: branch points are where others will restart).

    >>> restart_boundaries(10_000, units=(512, 32))
    [9728, 9984]
    >>> restart_boundaries(48, units=(16,)), restart_boundaries(48, units=(16,), junctions=(16,))
    ([32, 48], [16, 32, 48])
    >>> restart_boundaries(100, units=(16,), interval=32)
    [32, 64, 96]
    """
    wanted = set(junctions)
    for unit in units:
        wanted.update(((tokens - 1) // unit * unit, tokens // unit * unit))
    if interval is not None:
        wanted.update(range(interval, tokens + 1, interval))
    return sorted(position for position in wanted if 0 < position <= tokens)


def chunk_stop(start: int, stop: int, boundaries: Iterable[int]) -> int:
    """Where a chunk from ``start`` that could go on to ``stop`` ends: at the first boundary on the way.

    >>> ends, at = [], 0
    >>> while at < 10_000:
    ...     at = chunk_stop(at, min(at + 8_192, 10_000), restart_boundaries(10_000, (512, 32)))
    ...     ends.append(at)
    >>> ends
    [8192, 9728, 9984, 10000]
    """
    return min((position for position in boundaries if start < position < stop), default=stop)
