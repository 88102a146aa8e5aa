"""Reuse distance against capacity: how much cache the traffic needs, and if the fleet has just too little."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil

CHURN_EXTRA = 0.25
CHURN_SHARE = 0.5
"""A fleet churns when a quarter more cache would win back half of what eviction loses."""
LOSS_SHARE = 0.01
"""Of prompt tokens: below that eviction is no matter."""
NEEDED_SHARES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True)
class Need:
    """What the traffic asks of caches; tokens."""

    bands: tuple[tuple[str, int, int], ...]
    """(what the band is, its upper end, tokens reused within): one bar of the histogram."""
    needed: tuple[tuple[float, int], ...]
    """(share of what an infinite cache has, one cache must hold so many tokens)."""
    lost: int
    """Evicted before it came again, from one cache as large as the fleet."""
    churn_won: int
    """Of it, within a quarter more cache."""

    @property
    def churns(self) -> bool:
        """The working set is just above what fits: LRU evicts each block shortly before it comes again."""
        return self.lost > 0 and self.churn_won >= CHURN_SHARE * self.lost


def need(distances: Sequence[int], block_tokens: int, replica_tokens: int, capacity_tokens: int) -> Need:
    """From reuse distances in rising order, a block each.

    >>> found = need([100, 200, 1100, 1200, 5000], 16, 250, 1000)
    >>> found.lost, found.churn_won, found.churns, found.needed[1]
    (48, 32, True, (0.9, 5000))
    """

    def within(tokens: float) -> int:
        return bisect_right(distances, tokens) * block_tokens

    edges = [("a quarter of one replica", replica_tokens // 4), ("one replica", replica_tokens)]
    if capacity_tokens > replica_tokens:
        edges.append(("the fleet together", capacity_tokens))
    edges += [
        ("1.25 fleets", round((1 + CHURN_EXTRA) * capacity_tokens)),
        ("2 fleets", 2 * capacity_tokens),
        ("4 fleets", 4 * capacity_tokens),
    ]
    bands = []
    below = 0
    for name, edge in edges:
        bands.append((name, edge, within(edge) - below))
        below = within(edge)
    everything = len(distances) * block_tokens
    bands.append(("more", max(distances, default=0), everything - below))
    return Need(
        bands=tuple(bands),
        needed=tuple((share, _needed(distances, share)) for share in NEEDED_SHARES),
        lost=everything - within(capacity_tokens),
        churn_won=within((1 + CHURN_EXTRA) * capacity_tokens) - within(capacity_tokens),
    )


def _needed(distances: Sequence[int], share: float) -> int:
    if not distances:
        return 0
    return distances[min(len(distances), max(1, ceil(len(distances) * share))) - 1]
