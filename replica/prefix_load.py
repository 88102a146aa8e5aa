"""Room on the device for prefixes that come from another tier: taken, filled by a mover, then hittable.

A load is a sequence that computes nothing. While it runs its blocks belong to it alone, so that a copy in
flight never writes into somebody else's memory; what has arrived is published like computed KV, and the
request that wanted it, added afterwards, hits it in the ordinary way.
"""

from dataclasses import dataclass
from typing import Any

from replica.kv_cache.cache import Cache
from replica.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefixLoad:
    """Where to write: ``blocks`` hold positions ``start .. stop - 1`` of the sequence, in order.

    Each is written once, before it is said to have arrived: from then on others may own it.
    """

    loader: Sequence
    start: int
    stop: int
    blocks: tuple[int, ...]


class PrefixLoads:
    """The loads in flight.

    Blocks of 4 tokens. Eight tokens are on the host; the request is added when they are here:

    >>> from replica.kv_cache.prefix_cache import PrefixCache
    >>> cache = PrefixCache(4, block_size=4)
    >>> loads, request = PrefixLoads(cache), Sequence("a", range(10), max_tokens=1)
    >>> load = loads.begin(request, 8)
    >>> load.blocks, cache.match(request)
    ((0, 1), [])
    >>> loads.arrived(load, 8); cache.match(request)      # after the mover wrote blocks 0 and 1
    [0, 1]
    >>> loads.end(load); cache.free_blocks, len(loads)
    (4, 0)
    """

    def __init__(self, cache: Cache[Any]) -> None:
        self._cache = cache
        self._loads: dict[Sequence, PrefixLoad] = {}
        self._begun = 0

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def holders(self) -> list[Sequence]:
        """The sequences that hold the blocks."""
        return list(self._loads)

    def begin(self, sequence: Sequence, tokens: int) -> PrefixLoad | None:
        """Room for the first ``tokens`` (whole blocks) of a prompt, as far as they are not here already.

        None, changing nothing, when there is no room or nothing to load: the request computes them then.
        """
        cache = self._cache
        if not cache.enabled or not 0 < tokens <= sequence.total_tokens or tokens % cache.block_size:
            return None
        self._begun += 1
        loader = sequence.prefix(f"load {self._begun} for {sequence.request_id}", tokens)
        here = cache.match(loader)
        cache.hold(loader, here)
        if not cache.extend(loader):
            cache.release(loader)
            return None
        start = len(here) * cache.block_size
        load = PrefixLoad(loader, start, tokens, tuple(loader.block_table[len(here) :]))
        self._loads[loader] = load
        return load

    def arrived(self, load: PrefixLoad, tokens: int) -> None:
        """Positions up to ``tokens`` are written: hittable from now on. They stay held until ``end``.

        Raises ValueError for a load that is over, and for positions outside it or before those that arrived.
        """
        loader = load.loader
        if loader not in self._loads or not loader.computed_tokens <= tokens <= load.stop:
            raise ValueError(f"{tokens} tokens arrived for {load}: expected one in flight, in order")
        loader.computed_tokens = tokens
        self._cache.publish(loader)

    def end(self, load: PrefixLoad) -> None:
        """Nobody writes any more: what arrived stays cached, the other blocks are free. Twice is once."""
        if self._loads.pop(load.loader, None) is not None:
            self._cache.release(load.loader)
