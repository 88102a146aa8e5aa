"""In a large fleet, the few candidates worth pricing: the warmest, some idle ones, some at random.

Pricing 256 candidates for every request would cost more than routing saves. The best one is nearly always
among those that hold most of the prompt, those whose prefill queue is empty (join-idle-queue, Lu et al.,
2011) and a random handful (power of d choices, Mitzenmacher, 2001). Fleets of up to 32 are priced whole.
"""

import random
from collections.abc import Sequence
from typing import Final

from router.routing.replica_bits import bits
from router.routing.replica_state import ReplicaState
from router.routing.roster import Roster

PRICE_ALL_UP_TO: Final = 32
WARMEST: Final = 12
IDLE: Final = 10
ANY: Final = 10
NOT_IDLE: Final = -1

Levels = Sequence[tuple[int, int]]
"""(replicas as bits, how much of the prompt they hold), the deepest last."""


class Shortlist:
    """Draws at most 32 of the candidates; keeps track of who has an empty prefill queue."""

    __slots__ = ("_draw", "_drawn_in", "_idle", "_place", "_replicas", "_rng")

    def __init__(self, replicas: Roster, rng: random.Random) -> None:
        self._replicas = replicas.by_index
        self._rng = rng
        self._idle = [replica.index for replica in replicas]
        self._place: list[int] = []
        """By replica: where it stands in ``_idle``, or ``NOT_IDLE``."""
        for place, index in enumerate(self._idle):
            self._set_place(index, place)
        self._draw = 0
        """Number of the draw that is made."""
        self._drawn_in: list[int] = []
        """By replica: the last draw it was in. No bits, which are an object each time anew."""

    def became_busy(self, replica: int) -> None:
        """Its prefill queue is no longer empty, or it is gone. O(1)."""
        places = self._place
        place = places[replica] if replica < len(places) else NOT_IDLE
        if place != NOT_IDLE:
            places[replica] = NOT_IDLE
            last = self._idle.pop()
            if last != replica:
                self._idle[place] = last
                places[last] = place

    def became_idle(self, replica: int) -> None:
        """Its prefill queue is empty, or it is new. O(1)."""
        places = self._place
        if replica >= len(places) or places[replica] == NOT_IDLE:
            self._set_place(replica, len(self._idle))
            self._idle.append(replica)

    def _set_place(self, replica: int, place: int) -> None:
        while len(self._place) <= replica:
            self._place.append(NOT_IDLE)
        self._place[replica] = place

    def draw(self, candidates: Sequence[ReplicaState], usable: int, levels: Levels) -> list[ReplicaState]:
        """Some of ``candidates``, whose indexes are the bits of ``usable``; in no order, none twice.

        Cost: O(shortlist), not O(fleet).
        """
        if len(candidates) <= PRICE_ALL_UP_TO:
            return list(candidates)
        rng, replicas = self._rng.random, self._replicas
        there = usable.to_bytes((usable.bit_length() + 7) // 8, "little")
        self._draw = draw = self._draw + 1
        drawn_in = self._drawn_in
        while len(drawn_in) < 8 * len(there):
            drawn_in.append(0)
        out: list[ReplicaState] = []
        for index in bits(self._warmest(usable, levels)):
            drawn_in[index] = draw
            out.append(replicas[index])
        idle = self._idle
        size = len(idle)
        for _ in range(min(IDLE, size)):
            index = idle[int(rng() * size)]
            place = index >> 3
            if place < len(there) and there[place] & 1 << (index & 7) and drawn_in[index] != draw:
                drawn_in[index] = draw
                out.append(replicas[index])
        size = len(candidates)
        for _ in range(min(ANY, size)):
            replica = candidates[int(rng() * size)]
            if drawn_in[replica.index] != draw:
                drawn_in[replica.index] = draw
                out.append(replica)
        return out

    def _warmest(self, usable: int, levels: Levels) -> int:
        drawn, room = 0, WARMEST
        for mask, _ in reversed(levels):
            mask &= usable & ~drawn
            count = mask.bit_count()
            if count > room:
                mask = self._some_of(mask, room)
                count = room
            drawn |= mask
            room -= count
            if not room:
                break
        return drawn

    def _some_of(self, mask: int, count: int) -> int:
        """``count`` of the bits of ``mask``, those that follow a random place, around the end."""
        start = int(self._rng.random() * mask.bit_length())
        high, low = mask >> start << start, mask & ((1 << start) - 1)
        out = 0
        for part in (high, low):
            while part and count:
                bit = part & -part
                out |= bit
                part ^= bit
                count -= 1
        return out
