"""Who holds what, and how many copies: names as dictionary keys, replicas as bits.

One dictionary for all replicas: a walk over a prompt's names asks for each name once, however many replicas
there are. Second copies are rare and counted aside.
"""


class CountedHolders:
    """A multiset of (replica, name). Counts are of distinct names unless they say copies.

    >>> holders = CountedHolders(replicas=2)
    >>> holders.add(0, 7), holders.add(1, 7), holders.add(1, 7)         # True: the replica's first copy
    (True, True, False)
    >>> bin(holders.masks[7]), holders.copies(1, 7)
    ('0b11', 2)
    >>> holders.remove(1, 7), holders.remove(1, 7), holders.remove(1, 7)
    (False, True, None)
    """

    __slots__ = ("_bits", "_more_copies", "held", "masks")

    def __init__(self, replicas: int) -> None:
        self.masks: dict[int, int] = {}
        """Name -> the replicas that hold it, as bits; never 0."""
        self.held = [0] * replicas
        """Names held, by replica."""
        self._more_copies: dict[tuple[int, int], int] = {}
        self._bits: dict[int, int] = {}

    def add_replica(self) -> None:
        """Make room for one more replica, holding nothing."""
        self.held.append(0)

    def add(self, replica: int, name: int) -> bool:
        """One copy more; True if it is the first."""
        bit = 1 << replica
        mask = self.masks.get(name, 0)
        if mask & bit:
            key = (replica, name)
            self._more_copies[key] = self._more_copies.get(key, 0) + 1
            return False
        mask |= bit
        self.masks[name] = self._bits.setdefault(mask, mask)  # equal masks are one object
        self.held[replica] += 1
        return True

    def remove(self, replica: int, name: int) -> bool | None:
        """One copy less; True if it was the last, None if there was none."""
        bit = 1 << replica
        mask = self.masks.get(name, 0)
        if not mask & bit:
            return None
        if self._more_copies:
            key = (replica, name)
            more = self._more_copies.get(key)
            if more is not None:
                if more == 1:
                    del self._more_copies[key]
                else:
                    self._more_copies[key] = more - 1
                return False
        mask ^= bit
        if mask:
            self.masks[name] = self._bits.setdefault(mask, mask)
        else:
            del self.masks[name]
        self.held[replica] -= 1
        return True

    def copies(self, replica: int, name: int) -> int:
        """Copies of ``name`` that ``replica`` holds."""
        if not self.masks.get(name, 0) >> replica & 1:
            return 0
        return 1 + self._more_copies.get((replica, name), 0)

    def clear(self, replica: int) -> None:
        """``replica`` holds nothing. O(names)."""
        if not self.held[replica]:
            return
        bit = 1 << replica
        for name in [name for name, mask in self.masks.items() if mask & bit]:
            mask = self.masks[name] ^ bit
            if mask:
                self.masks[name] = self._bits.setdefault(mask, mask)
            else:
                del self.masks[name]
        for key in [key for key in self._more_copies if key[0] == replica]:
            del self._more_copies[key]
        self.held[replica] = 0

    def names(self, replica: int) -> set[int]:
        """Everything ``replica`` holds. O(names)."""
        bit = 1 << replica
        return {name for name, mask in self.masks.items() if mask & bit}

    def check_invariants(self) -> None:
        """Raise ``AssertionError`` if masks and counts disagree. O(names)."""
        counted = [0] * len(self.held)
        for name, mask in self.masks.items():
            assert mask > 0 and mask >> len(self.held) == 0, f"mask {mask:b} of {name}"
            for replica in range(len(counted)):
                counted[replica] += mask >> replica & 1
        assert counted == self.held, f"held {self.held}, counted {counted}"
        for (replica, name), more in self._more_copies.items():
            assert more > 0 and self.masks.get(name, 0) >> replica & 1, "copies of what is not held"
