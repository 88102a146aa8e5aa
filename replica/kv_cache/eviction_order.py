"""Which leaf of the radix tree gives up memory first: lru, slru, lfu, or the order that spares the slow tail.

Only leaves are asked, and a leaf gives from its end, so whatever the order, a prefix outlives its
continuations.
"""

from dataclasses import dataclass
from typing import Protocol

from replica.kv_cache.radix_node import Node

Rank = tuple[int, ...]
"""The smallest goes first."""


class EvictionOrder(Protocol):
    """An order among leaves; it may change only when the node is used or gives something up."""

    def rank(self, node: Node) -> Rank:
        """The leaf's place in the order."""

    def most(self, node: Node) -> int:
        """How many units, from its end, it gives up before its rank is asked again; at least 1."""


@dataclass(frozen=True, slots=True)
class LeastRecent:
    """``lru``: the leaf whose last adoption or release is longest ago.

    >>> old, young = Node(None, 0), Node(None, 0)
    >>> old.last_use, young.last_use = 3, 8
    >>> LeastRecent().rank(old) < LeastRecent().rank(young)
    True
    """

    def rank(self, node: Node) -> Rank:
        """Last use."""
        return (node.last_use,)

    def most(self, node: Node) -> int:
        """All of it."""
        return len(node.units)


@dataclass(frozen=True, slots=True)
class LeastFrequent(LeastRecent):
    """``lfu``: the leaf that was hit least often; among equals the one not used for longest.

    >>> often, once = Node(None, 0), Node(None, 0)
    >>> often.uses, often.last_use, once.last_use = 5, 1, 9
    >>> LeastFrequent().rank(once) < LeastFrequent().rank(often)
    True
    """

    def rank(self, node: Node) -> Rank:
        """Uses, then last use."""
        return (node.uses, node.last_use)


@dataclass(frozen=True, slots=True)
class Segmented(LeastRecent):
    """``slru``: leaves never hit since they were stored go before those that were; each by last use.

    A scan of prompts that nobody repeats leaves alone what was used twice.

    >>> twice, scanned = Node(None, 0), Node(None, 0)
    >>> twice.uses, twice.last_use, scanned.last_use = 2, 1, 9
    >>> Segmented().rank(scanned) < Segmented().rank(twice)
    True
    """

    def rank(self, node: Node) -> Rank:
        """Probation before protection, then last use."""
        return (int(node.uses >= 2), node.last_use)


@dataclass(frozen=True, slots=True)
class TailOptimised(LeastRecent):
    """``tlru``: first what a next turn can recompute within its latency budget, then by last use.

    A conversation of L units comes back with about Q new ones. If ``slack_units`` = (what may be computed
    within the budget) - Q, then its last ``slack_units`` can go and the next turn still meets the budget, so
    they go before anything of a conversation that has lost them already. (arXiv 2510.15152.)

    Slack 100: a leaf of 300 units that lost nothing gives 100 first, even if it is the youngest:

    >>> order, young, old = TailOptimised(100), Node(None, 0), Node(None, 0)
    >>> young.units, young.last_use, old.units, old.lost, old.last_use = [1] * 300, 9, [1] * 300, 100, 2
    >>> order.rank(young) < order.rank(old), order.most(young), order.most(old)
    (True, 100, 300)
    """

    slack_units: int

    def rank(self, node: Node) -> Rank:
        """What can go unnoticed before what cannot, then last use."""
        return (int(node.lost >= self.slack_units), node.last_use)

    def most(self, node: Node) -> int:
        """What is left of the slack; all of it when nothing is."""
        left = self.slack_units - node.lost
        return min(left, len(node.units)) if left > 0 else len(node.units)


def eviction_order(kind: str, slack_units: int = 0) -> EvictionOrder:
    """The order called ``kind``: "lru", "slru", "lfu" or "tlru" (which needs ``slack_units``)."""
    match kind:
        case "lru":
            return LeastRecent()
        case "slru":
            return Segmented()
        case "lfu":
            return LeastFrequent()
        case "tlru" if slack_units >= 1:
            return TailOptimised(slack_units)
        case "tlru":
            raise ValueError(f"eviction order tlru with a slack of {slack_units} units: give at least 1")
    raise ValueError(f"eviction order {kind!r}: give lru, slru, lfu or tlru")
