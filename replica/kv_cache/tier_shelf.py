"""Which block hashes one tier holds: bounded, least recently used goes first, never what is being copied."""

from collections import OrderedDict
from collections.abc import Iterator

from replica.contract.kv_events import BlockHash


class Entry:
    """One block's bytes in the tier; readable when they are whole and nobody doomed them."""

    __slots__ = ("checksum", "doomed", "readers", "writing")

    def __init__(self) -> None:
        self.writing = True
        """They are on their way in."""
        self.doomed = False
        """To be deleted as soon as nobody copies from or to them."""
        self.readers = 0
        """Copies from it in flight."""
        self.checksum: int | None = None

    @property
    def readable(self) -> bool:
        """May be read."""
        return not self.writing and not self.doomed


class TierShelf:
    """At most ``capacity`` entries, in order of last use; every entry takes room, whatever its state.

    An entry that must go while it is copied is doomed, and deleted by whoever lets go of it last. Methods
    that may delete return True when the bytes are to be deleted now.

    >>> shelf = TierShelf(2)
    >>> shelf.reserve(b"a"), shelf.reserve(b"b"), shelf.reserve(b"c")       # two places
    (True, True, False)
    >>> shelf.written(b"a", checksum=7), shelf.readable(b"a"), shelf.readable(b"b")
    (False, True, False)
    >>> list(shelf.oldest()), shelf.doom(b"b"), shelf.written(b"b", None)   # b is deleted when its copy ends
    ([b'a'], False, True)
    >>> shelf.room
    1
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._entries: OrderedDict[BlockHash, Entry] = OrderedDict()

    def __contains__(self, block_hash: BlockHash) -> bool:
        """Takes room here."""
        return block_hash in self._entries

    @property
    def room(self) -> int:
        """Entries that can still be reserved."""
        return self.capacity - len(self._entries)

    @property
    def hashes(self) -> list[BlockHash]:
        """Of all entries, least recently used first."""
        return list(self._entries)

    def readable(self, block_hash: BlockHash) -> bool:
        """Its bytes are whole and may be read."""
        entry = self._entries.get(block_hash)
        return entry is not None and entry.readable

    def arriving(self, block_hash: BlockHash) -> bool:
        """Its bytes will be readable when they are written."""
        entry = self._entries.get(block_hash)
        return entry is not None and entry.writing and not entry.doomed

    def checksum(self, block_hash: BlockHash) -> int | None:
        """Of a readable entry, as it was written; None: unknown."""
        return self._entries[block_hash].checksum

    def readers(self, block_hash: BlockHash) -> int:
        """Copies from it in flight."""
        return self._entries[block_hash].readers

    def coldest(self, count: int) -> list[BlockHash]:
        """The first ``count`` readable entries in order of last use, copied or not."""
        found: list[BlockHash] = []
        for block_hash, entry in self._entries.items():
            if len(found) >= count:
                break
            if entry.readable:
                found.append(block_hash)
        return found

    def oldest(self) -> Iterator[BlockHash]:
        """Readable entries nobody copies, least recently used first."""
        for block_hash, entry in self._entries.items():
            if entry.readable and not entry.readers:
                yield block_hash

    # Changes

    def reserve(self, block_hash: BlockHash) -> bool:
        """Room for bytes that are about to be written; False when there is none or it is here already."""
        if self.room <= 0 or block_hash in self._entries:
            return False
        self._entries[block_hash] = Entry()
        return True

    def written(self, block_hash: BlockHash, checksum: int | None) -> bool:
        """The reserved bytes are whole."""
        entry = self._writing(block_hash)
        entry.writing = False
        entry.checksum = checksum
        return self._delete_if_free(block_hash, entry)

    def not_written(self, block_hash: BlockHash) -> bool:
        """The reserved bytes will not come, or only in part."""
        entry = self._writing(block_hash)
        entry.writing = False
        entry.doomed = True
        return self._delete_if_free(block_hash, entry)

    def pin(self, block_hash: BlockHash) -> None:
        """A copy from it begins. Raises ValueError unless it is readable."""
        if not self.readable(block_hash):
            raise ValueError(f"block {block_hash!r} cannot be read: it is not here whole")
        self._entries[block_hash].readers += 1

    def unpin(self, block_hash: BlockHash) -> bool:
        """A copy from it ended."""
        entry = self._entries[block_hash]
        if entry.readers < 1:
            raise ValueError(f"block {block_hash!r}: a copy ended that never began")
        entry.readers -= 1
        return self._delete_if_free(block_hash, entry)

    def doom(self, block_hash: BlockHash) -> bool:
        """It is not wanted any more, or its bytes are wrong."""
        entry = self._entries[block_hash]
        entry.doomed = True
        return self._delete_if_free(block_hash, entry)

    def touch(self, block_hash: BlockHash) -> None:
        """Used now."""
        self._entries.move_to_end(block_hash)

    def _writing(self, block_hash: BlockHash) -> Entry:
        entry = self._entries.get(block_hash)
        if entry is None or not entry.writing:
            raise ValueError(f"block {block_hash!r}: a copy to it ended that never began")
        return entry

    def _delete_if_free(self, block_hash: BlockHash, entry: Entry) -> bool:
        if not entry.doomed or entry.writing or entry.readers:
            return False
        del self._entries[block_hash]
        return True

    def check_invariants(self) -> None:
        """Raise AssertionError unless within capacity and in states that can be."""
        assert len(self._entries) <= self.capacity
        for block_hash, entry in self._entries.items():
            assert not (entry.writing and entry.readers), f"{block_hash!r} is read before it is written"
            assert entry.readable or entry.writing or entry.readers, f"{block_hash!r} should be gone"
