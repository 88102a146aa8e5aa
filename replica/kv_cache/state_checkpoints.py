"""Recurrent state: one live slot per running sequence, and frozen copies from which prefixes can restart.

A slot holds the state of all recurrent layers after exactly ``position`` tokens, written state@position.
Unlike KV, a state cannot be cut: state@1600 says nothing of state@364. So a copy is published at position p
only if the live slot holds state@p, which the runner reports after every step; most corruption of hybrid
models in other engines is a breach of this one rule (vLLM #45477, #51113, #34587, #43559, #53912).

Three slots; 32 tokens are computed in two steps, and the state is kept at 16:

>>> states = StateCheckpoints(3)
>>> states.begin("a", None), states.ran("a", 0, 16), states.publish("a", 16, b"prefix of 16")
(0, None, True)
>>> states.ran("a", 16, 32); states.publish("a", 16, b"again")        # the slot holds state@32 by now
False
>>> states.begin("b", b"prefix of 16"), states.position("b"), states.take_orders()
(2, 16, [ZeroState(slot=0), CopyState(source=0, target=1), CopyState(source=1, target=2)])
>>> states.inventory()
StateInventory(live=2, checkpoints=1, free=0)
"""

from collections import OrderedDict
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from replica.kv_cache.cache_record import drained


@dataclass(frozen=True, slots=True)
class ZeroState:
    """Write the state before the first token into ``slot``."""

    slot: int


@dataclass(frozen=True, slots=True)
class CopyState:
    """Copy every layer's state from one slot to another."""

    source: int
    target: int


StateOrder = ZeroState | CopyState
"""To be done in the order given, before the next step."""


@dataclass(frozen=True, slots=True)
class StateInventory:
    """Slots by use; together all there are."""

    live: int
    checkpoints: int
    free: int


@dataclass(slots=True)
class StateCounters:
    """What happened to checkpoints."""

    published: int = 0
    not_exact: int = 0
    """Not published: the slot held another position's state."""
    no_slot: int = 0
    """Not published: every slot was live."""
    restored: int = 0
    evicted: int = 0


class _Live:
    __slots__ = ("position", "slot")

    def __init__(self, slot: int, position: int) -> None:
        self.slot = slot
        self.position: int | None = position


class _Checkpoint:
    __slots__ = ("position", "slot", "uses")

    def __init__(self, slot: int, position: int) -> None:
        self.slot = slot
        self.position = position
        self.uses = 0


class StateCheckpoints:
    """``slots`` for states, numbered from 0. Names are collision-proof (32-byte chained digests).

    A checkpoint outlives the KV of its prefix and is right whenever that comes back. When a slot is wanted
    and none is free, the checkpoint not restored for longest goes; a hit makes young only the one it
    restores from, since the shallower ones were of no use to it.
    """

    def __init__(self, slots: int) -> None:
        if slots < 1:
            raise ValueError(
                f"{slots} state slots: give at least 1, better one per running sequence and more"
            )
        self.slots = slots
        self.counters = StateCounters()
        self._free = list(range(slots - 1, -1, -1))
        self._live: dict[Hashable, _Live] = {}
        self._checkpoints: OrderedDict[Hashable, _Checkpoint] = OrderedDict()
        self._orders: list[StateOrder] = []

    # Questions

    def inventory(self) -> StateInventory:
        """Slots by use."""
        return StateInventory(len(self._live), len(self._checkpoints), len(self._free))

    def can_begin(self) -> bool:
        """A slot is free or can be freed."""
        return bool(self._free or self._checkpoints)

    def holds(self, holder: Hashable) -> bool:
        """The holder has a live slot."""
        return holder in self._live

    def slot(self, holder: Hashable) -> int:
        """The live slot the runner reads and writes."""
        return self._live[holder].slot

    def position(self, holder: Hashable) -> int | None:
        """Tokens the live slot's state has seen; None: unknown, a step failed."""
        return self._live[holder].position

    def checkpoint_position(self, name: Hashable) -> int | None:
        """Position of a checkpoint, or None when there is none of this name."""
        found = self._checkpoints.get(name)
        return found.position if found is not None else None

    # A sequence's live state

    def begin(self, holder: Hashable, name: Hashable | None) -> int:
        """A live slot that holds the checkpoint ``name``, or state@0 for None; its number.

        The checkpoint stays, unless its slot is the only one to be had. Raises ValueError for a holder that
        has one, KeyError for an unknown name, IndexError when no slot is to be had.
        """
        if holder in self._live:
            raise ValueError(f"{holder} has a live state: end it first")
        if name is None:
            slot = self._take_slot()
            self._orders.append(ZeroState(slot))
            self._live[holder] = _Live(slot, 0)
            return slot
        source = self._checkpoints[name]
        self._checkpoints.move_to_end(name)
        source.uses += 1
        self.counters.restored += 1
        slot = self._take_slot()  # the youngest goes last: the source itself only if there is no other
        if slot != source.slot:
            self._orders.append(CopyState(source.slot, slot))
        self._live[holder] = _Live(slot, source.position)
        return slot

    def ran(self, holder: Hashable, start: int, stop: int) -> None:
        """A step took the live state from ``start`` to ``stop`` tokens. Nothing happens without a live slot.

        If it was not at ``start`` it is unknown from now on.
        """
        live = self._live.get(holder)
        if live is not None:
            live.position = stop if live.position == start else None

    def lost(self, holder: Hashable) -> None:
        """A step failed half-way: what the slot holds is unknown."""
        if holder in self._live:
            self._live[holder].position = None

    def end(self, holder: Hashable) -> None:
        """The holder needs its state no more. Nothing happens without a live slot."""
        live = self._live.pop(holder, None)
        if live is not None:
            self._free.append(live.slot)

    # Checkpoints

    def publish(
        self, holder: Hashable, position: int, name: Hashable, replaces: Hashable | None = None
    ) -> bool:
        """Keep a copy of the live state as ``name``, if it is exactly state@``position``; whether it is kept.

        ``replaces``: an earlier checkpoint of the holder, dropped if nobody restarted from it.
        """
        live = self._live[holder]
        if live.position != position:
            self.counters.not_exact += 1
            return False
        if name in self._checkpoints:
            self._checkpoints.move_to_end(name)
            return True
        old = self._checkpoints.get(replaces) if replaces is not None else None
        if old is not None and not old.uses:
            self.forget([replaces])
        if not self.can_begin():
            self.counters.no_slot += 1
            return False
        slot = self._take_slot()
        self._orders.append(CopyState(live.slot, slot))
        self._checkpoints[name] = _Checkpoint(slot, position)
        self.counters.published += 1
        return True

    def forget(self, names: Iterable[Hashable]) -> None:
        """Drop these checkpoints; unknown names are ignored."""
        for name in names:
            gone = self._checkpoints.pop(name, None)
            if gone is not None:
                self._free.append(gone.slot)

    def forget_all(self) -> None:
        """Drop every checkpoint: the weights changed."""
        self.forget(list(self._checkpoints))

    def take_orders(self) -> list[StateOrder]:
        """What to do with the slots before the next step, in order."""
        return drained(self._orders)

    def _take_slot(self) -> int:
        if self._free:
            return self._free.pop()
        if not self._checkpoints:
            raise IndexError(f"all {self.slots} state slots are live")
        self.counters.evicted += 1
        return self._checkpoints.popitem(last=False)[1].slot

    def check_invariants(self) -> None:
        """Raise AssertionError unless every slot has exactly one use."""
        used = [live.slot for live in self._live.values()]
        used += [checkpoint.slot for checkpoint in self._checkpoints.values()]
        assert sorted(used + self._free) == list(range(self.slots)), "a slot has no use or two"
        assert all(checkpoint.position > 0 for checkpoint in self._checkpoints.values())
