"""A replica some of whose KV events were lost for good: what they still tell, what is guessed instead.

A lost batch stored a few blocks and removed a few, of many thousands. So what was told stays: it is wrong in
those few alone. Blocks it does not tell of are guessed from what was sent, except those a later event has
removed. A block that was removed unheard of is a phantom: should it be stored again, its event tells of one
copy, not of a second one, and it is right again.

The doubt ends when as many blocks were removed as the replica held at the loss: its cache has turned over.

Worked example: blocks a, b, c are told; a batch with ``stored d, removed c`` is lost. Of the prompt a b d e
events tell two blocks; it was sent there, so d and e are guessed, four in all. ``removed e`` comes: three.
"""

from collections.abc import Iterable, Sequence

from replica.contract.kv_events import BlockHash
from router.routing.block_index import block_name


class EventDoubt:
    """One replica's, from the last loss on.

    >>> doubt = EventDoubt(held=2, most_gone=100)
    >>> doubt.removed([5, 6]), doubt.stored([6])
    (True, None)
    >>> doubt.guessed([3, 4, 5, 6], told=1, believed=4), doubt.guessed([3, 4, 6], told=1, believed=3)
    (2, 3)
    """

    __slots__ = ("_gone", "_most_gone", "_to_turn_over")

    def __init__(self, held: int, most_gone: int) -> None:
        """The replica held ``held`` blocks; the last ``most_gone`` that were removed are remembered."""
        self._to_turn_over = held
        self._most_gone = most_gone
        self._gone: dict[int, None] = {}

    def again(self, held: int) -> None:
        """More was lost: from here on the cache has to turn over."""
        self._to_turn_over = held

    def stored(self, hashes: Iterable[BlockHash]) -> None:
        """These are there again."""
        for value in hashes:
            self._gone.pop(block_name(value), None)

    def removed(self, hashes: Iterable[BlockHash]) -> bool:
        """These are certainly not there. True if the doubt is over."""
        gone = self._gone
        for value in hashes:
            name = block_name(value)
            gone.pop(name, None)
            gone[name] = None
            self._to_turn_over -= 1
        while len(gone) > self._most_gone:
            del gone[next(iter(gone))]
        return self._to_turn_over <= 0

    def guessed(self, keys: Sequence[int], told: int, believed: int) -> int:
        """Leading blocks of ``keys`` the replica is taken to hold: the ``told`` ones, then those that were
        ``believed`` from what was sent, up to the first that was removed since."""
        gone = self._gone
        for at in range(told, believed):
            if keys[at] in gone:
                return at
        return max(told, believed)
